"""Logits looked up at a few columns of every row: the target with its stop class, and a top-K
support.

Both are small softmaxes over looked-up logits whose gradient is sparse: values to scatter-add at
the same ids. C rows of a chunk, J target and stop columns, K support columns. Logits here are
whole (already summed over shards) and divided by the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stable_opd_mcore.losses.head import StopClass, require_stop_ids
from stable_opd_mcore.losses.passes import Normaliser


@dataclass(frozen=True)
class Target:
    """The sampled token of every row, or its stop class (METHOD §4)."""

    ids_CJ: Tensor
    logprob_C: Tensor  # of the class where the target is a stop token, else of the token
    token_logprob_C: Tensor  # always of the token itself
    share_CJ: Tensor  # d logprob / d logits at ids, the part beside -p: pi(column) / pi(class)


@dataclass(frozen=True)
class Lookup:
    """Which columns to read for every row: the target, then all stop ids of the class."""

    ids_CJ: Tensor
    triggered_C: (
        Tensor | None
    )  # the target is a stop token of either model; None: there is no class
    member_CJ: Tensor | None  # columns that make up the class

    @classmethod
    def of(cls, targets_C: Tensor, stop: StopClass | None, vocab_size: int) -> Lookup:
        """Raises ValueError for a stop id outside the common vocabulary."""
        if stop is None:
            return cls(targets_C[:, None], None, None)
        require_stop_ids(stop.class_ids, vocab_size)
        class_J = targets_C.new_tensor(stop.class_ids)
        ids_CJ = torch.cat([targets_C[:, None], class_J.expand(len(targets_C), -1)], dim=1)
        member_CJ = torch.ones_like(ids_CJ, dtype=torch.bool)
        # The target's own column doubles one of the class's where it is in it.
        member_CJ[:, 0] = ~torch.isin(targets_C, class_J) & stop.include_target
        triggered_C = torch.isin(targets_C, targets_C.new_tensor(stop.trigger_ids))
        return cls(ids_CJ, triggered_C, member_CJ)

    def read(self, logits_CJ: Tensor, normaliser: Normaliser) -> Target:
        logprob_CJ = normaliser.log_softmax(logits_CJ)
        token_logprob_C = logprob_CJ[:, 0]
        if self.triggered_C is None or self.member_CJ is None:
            share_CJ = torch.ones_like(logprob_CJ)
            return Target(self.ids_CJ, token_logprob_C, token_logprob_C, share_CJ)
        members_CJ = logprob_CJ.masked_fill(~self.member_CJ, -torch.inf)
        class_logprob_C = members_CJ.logsumexp(1)
        only_target_CJ = torch.zeros_like(logprob_CJ)
        only_target_CJ[:, 0] = 1
        return Target(
            ids_CJ=self.ids_CJ,
            logprob_C=torch.where(self.triggered_C, class_logprob_C, token_logprob_C),
            token_logprob_C=token_logprob_C,
            share_CJ=torch.where(self.triggered_C[:, None], members_CJ.softmax(1), only_target_CJ),
        )


@dataclass(frozen=True)
class Support:
    """KL(p || q) with both renormalised over K columns (METHOD §3, lsm and student_topk)."""

    ids_CK: Tensor
    value_C: Tensor
    gradient_CK: Tensor  # d value / d student logits at ids: p (log p/q - KL)

    @classmethod
    def of(cls, ids_CK: Tensor, student_CK: Tensor, teacher_CK: Tensor) -> Support:
        """From logits or log-probabilities of both models at the same ids; constants cancel."""
        log_p = student_CK.log_softmax(1)
        gap_CK = log_p - teacher_CK.to(log_p.dtype).log_softmax(1)
        p = log_p.exp()
        value_C = (p * gap_CK).sum(1)
        return cls(ids_CK, value_C, p * (gap_CK - value_C[:, None]))
