"""What a loss is made of (`Terms`, per objective) and fed with (`Rows`, per micro-batch).

Not here: which objective has which terms (objectives.py) and how they are computed (fused.py,
chunk.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from torch import Tensor

from stable_opd_mcore.config.schema import AdvantageConfig
from stable_opd_mcore.losses.advantages import AdvantageFunction
from stable_opd_mcore.losses.head import StopClass
from stable_opd_mcore.records import MicroBatch

Divergence = Literal["forward", "reverse", "jsd", "teacher_support", "student_support"]
NO_OPTIONS = AdvantageConfig.model_validate({})
DENSE: tuple[Divergence, ...] = ("forward", "reverse", "jsd")


@dataclass(frozen=True)
class Terms:
    """What an objective's loss is made of; its policy term is a surrogate or a divergence."""

    advantage: AdvantageFunction | None = None  # surrogate on the sampled token
    divergence: Divergence | None = None  # of student and teacher at every visited prefix
    settings: AdvantageConfig = NO_OPTIONS
    clip: float = 0.2
    discount: float = 0.0
    jsd_beta: float = 0.5
    top_k: int = 32
    reference: Literal["none", "exact", "k3"] = "none"
    temperature: float = 1.0
    stop: StopClass | None = None  # the student's
    teacher_stop: StopClass | None = None  # the teacher's, where its logits are made here

    @property
    def teacher_logits(self) -> bool:
        """Whether the teacher's logits are made here, from its hidden states and head."""
        return self.divergence in (*DENSE, "student_support") or self.settings.control_variate

    @property
    def teacher_pair(self) -> bool:
        """Whether the student meets the teacher over the full vocabulary."""
        return self.divergence in DENSE or self.settings.control_variate

    @property
    def merged_ids(self) -> tuple[int, ...]:
        """Stop ids that are one outcome in every distribution of the loss; empty for none.

        Where nothing but sampled tokens meets the teacher there are none: the reference stops as
        the student does, and the KL to it then also holds the student to its own stop token.
        """
        compares = self.divergence is not None or self.settings.control_variate
        return self.stop.trigger_ids if self.stop is not None and compares else ()


@dataclass(frozen=True)
class Rows:
    """The loss's inputs that have one entry per scored row, [C] or [C, ...]."""

    targets: Tensor
    pg_weight: Tensor
    kl_weight: Tensor
    sft_weight: Tensor
    old_logprob: Tensor | None
    old_token_logprob: Tensor | None
    advantage: Tensor | None  # given with the sample, or the return-to-go of a first pass
    teacher_logprob: Tensor | None  # given, or found from the hidden states
    teacher_hidden: Tensor | None
    topk_ids: Tensor | None
    topk_logprobs: Tensor | None
    reference_logprob: Tensor | None
    reference_hidden: Tensor | None

    @classmethod
    def of(cls, batch: MicroBatch) -> Rows:
        teacher, reference = batch.teacher, batch.reference
        return cls(
            targets=batch.targets_N,
            pg_weight=batch.pg_weight_N,
            kl_weight=batch.kl_weight_N,
            sft_weight=batch.sft_weight_N,
            old_logprob=batch.old_logprob_N,
            old_token_logprob=batch.old_token_logprob_N,
            advantage=batch.given_advantage_N,
            teacher_logprob=teacher.logprob_N if teacher else None,
            teacher_hidden=teacher.hidden_NH if teacher else None,
            topk_ids=teacher.topk_ids_NK if teacher else None,
            topk_logprobs=teacher.topk_logprobs_NK if teacher else None,
            reference_logprob=reference.logprob_N if reference else None,
            reference_hidden=reference.hidden_NH if reference else None,
        )

    def token_advantage(self, behaviour: Tensor, terms: Terms) -> Tensor:
        """A of every token by itself, given log pi_old: no discounted sum, no baseline."""
        assert terms.advantage is not None
        return terms.advantage(behaviour, self.teacher_logprob, self.advantage, terms.settings)

    def __getitem__(self, rows: slice) -> Rows:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        chosen: dict[str, Any] = {
            name: value[rows] for name, value in values.items() if value is not None
        }
        return replace(self, **chosen)
