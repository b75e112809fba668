"""Stop tokens as one outcome, for losses that compare whole distributions (METHOD §4).

Student and teacher may end on different tokens; compared id by id, the student would unlearn to
stop. So the stop ids of both are merged in every model's logits before anything is summed: the
first of them takes the logsumexp of all, the others NEVER. Shapes, ids and passes stay as they
are. What comes back for the one outcome is spread over its ids by the student's softmax among
them. Not here: which losses merge (terms.py).

C rows of a chunk, V columns of this rank's shard, J merged ids, M models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stable_opd_mcore.losses.head import Head, accumulation_dtype, require_stop_ids

# A logit far below any other, and finite: a probability of 0 times it must be 0 in every sum.
NEVER = -1e9


@dataclass(frozen=True)
class Outcome:
    """The merged ids of one chunk. Logits are undivided by the temperature, fp32 or fp64."""

    ids: tuple[int, ...]  # of which the first holds the outcome
    logit_C1: Mapping[str, Tensor]  # per model, rounded as its logits are
    share_CJ: Tensor  # the student's probabilities of the ids within the outcome

    def spread_(
        self, gradient_CV: Tensor, outcome_C1: Tensor, ids_CK: Tensor, values_CK: Tensor, head: Head
    ) -> None:
        """Overwrite the ids' columns: their shares of d loss / d outcome, plus values at ids_CK."""
        ids_J = torch.tensor(self.ids, device=ids_CK.device)
        at_ids_CJ = torch.where(ids_CK[:, :, None] == ids_J, values_CK[:, :, None], 0).sum(1)
        _write_columns_(gradient_CV, self.ids, self.share_CJ * outcome_C1 + at_ids_CJ, head)


def merge_(
    logits_CV: Mapping[str, Tensor], ids: tuple[int, ...], scale: float, head: Head
) -> Outcome:
    """Make `ids` one outcome in the logits of every model, in place. One small all-reduce.

    Args:
        logits_CV: per model, the student's first; all cover the columns of `head`.
        ids: stop ids of student and teacher together.
        scale: 1 / temperature; probabilities add up, not logits.

    Raises:
        UserError: an id outside the common vocabulary.
    """
    require_stop_ids(ids, head.vocab_size)
    rows = next(iter(logits_CV.values())).shape[0]
    ids_CJ = torch.tensor(ids, device=head.weight_VH.device).expand(rows, -1)
    whole_MCJ = torch.stack([head.gather_columns(x, ids_CJ) for x in logits_CV.values()])
    head.reduce_(whole_MCJ)
    highest_MC1 = whole_MCJ.amax(2, keepdim=True)
    apart_MCJ = (whole_MCJ - highest_MC1) * scale
    # In this order a class of which one id has all the mass keeps that id's logit to the bit.
    merged_MC1 = highest_MC1 + apart_MCJ.logsumexp(2, keepdim=True) / scale
    rounded = {}
    for (name, x), merged_C1 in zip(logits_CV.items(), merged_MC1, strict=True):
        columns_CJ = torch.full_like(apart_MCJ[0], NEVER)
        columns_CJ[:, :1] = merged_C1
        _write_columns_(x, ids, columns_CJ, head)
        rounded[name] = merged_C1.to(x.dtype).to(accumulation_dtype(x))
    return Outcome(ids, rounded, apart_MCJ[0].softmax(1))


def _write_columns_(x_CV: Tensor, ids: tuple[int, ...], values_CJ: Tensor, head: Head) -> None:
    """x[:, id] = values for those ids that live in this shard."""
    for index, token in enumerate(ids):
        column = token - head.vocab_start
        if 0 <= column < head.num_columns:
            x_CV[:, column] = values_CJ[:, index]
