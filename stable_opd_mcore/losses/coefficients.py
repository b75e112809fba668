"""Per-token coefficients of the loss: advantages, the clipped surrogate, the sampled KL, and how
each enters the gradient (docs/method.md §1-3).

Every function works on vectors over rows; none sees logits. Advantages are constants of the loss:
all inputs are detached. Not here: advantages from rewards, which need the global batch
(token_weights.py), and divergences over the vocabulary (vocabulary_sums.py).

N rows of a micro-batch, C rows of a block.
"""

# torch types `tolist`, `unique` and `all_gather` only in part; the results in use are cast.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from stable_opd_mcore.config.schema import AdvantageConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.output_head import Head, require_same_columns
from stable_opd_mcore.losses.stop_tokens import TargetLogprobs
from stable_opd_mcore.losses.torch_ops import DenseTerm
from stable_opd_mcore.records import LossOutput, MicroBatch, Scores

NO_OPTIONS = AdvantageConfig.model_validate({})
NO_SCORES = Scores(None)
SUPPORTS = ("teacher_support", "student_support")
K3_BOUND = 10.0  # log ratio up to which k3 is exponential

# (behaviour log-prob, teacher log-prob, advantage given with the sample, settings) -> advantage
AdvantageFunction = Callable[[Tensor, Tensor | None, Tensor | None, AdvantageConfig], Tensor]


@dataclass(frozen=True)
class Terms:
    """What an objective's loss is made of; its policy term is a surrogate or a divergence."""

    advantage: AdvantageFunction | None = None  # surrogate on the sampled token
    # of student and teacher at every visited prefix: one of SUPPORTS, or a kind of DenseTerm
    divergence: str | None = None
    settings: AdvantageConfig = NO_OPTIONS
    clip: float = 0.2
    discount: float = 0.0
    jsd_beta: float = 0.5
    top_k: int = 32
    reference: Literal["none", "exact", "k3", "k3+"] = "none"
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()  # one outcome in the comparison with the teacher

    @property
    def compared_models(self) -> tuple[str, ...]:
        """Models that the student is compared with over the full vocabulary."""
        dense = self.divergence is not None and self.divergence not in SUPPORTS
        reference = ("reference",) if self.reference == "exact" else ()
        return (*reference, "teacher") if dense or self.settings.control_variate else reference

    @property
    def teacher_logits(self) -> bool:
        """Whether the teacher's logits are made here, from its hidden states and head."""
        return "teacher" in self.compared_models or self.divergence == "student_support"

    @property
    def merged_ids(self) -> tuple[int, ...]:
        """Stop ids that are one outcome in every distribution of the loss; empty for none.

        Where only sampled tokens are compared with the teacher nothing is merged: the reference
        stops as the student does, and the KL to it then keeps the student's own stop token too.
        """
        compares = self.divergence is not None or self.settings.control_variate
        return self.stop_ids if compares else ()


def needed_heads(
    hidden_NH: Tensor,
    batch: MicroBatch,
    terms: Terms,
    student: Head,
    teacher: Head | None,
    reference: Head | None,
) -> dict[str, Head]:
    """Heads of the models whose logits the terms need; refuses missing scores and unfit heads."""
    count, heads = batch.targets_N.shape[0], {"student": student}
    if hidden_NH.shape[0] != count:
        raise ValueError(
            f"{hidden_NH.shape[0]} hidden states for {count} scored rows: "
            "select them with hidden_TH.index_select(0, microbatch.rows_N)"
        )
    for name, needed, head, scores in (
        ("teacher", terms.teacher_logits, teacher, batch.teacher),
        ("reference", terms.reference == "exact", reference, batch.reference),
    ):
        if not needed:
            continue
        if head is None or scores is None or scores.hidden_NH is None:
            raise ValueError(f"the loss needs the {name}'s hidden states and output head")
        require_same_columns(student, head, name)
        heads[name] = head
    sampled = terms.reference in ("k3", "k3+")
    if sampled and (batch.reference or NO_SCORES).logprob_N is None:
        raise ValueError(f"kl.estimator={terms.reference} needs the reference's log-probabilities")
    if terms.divergence == "teacher_support" and (batch.teacher or NO_SCORES).topk_ids_NK is None:
        raise ValueError("the loss needs the teacher's top-k ids and log-probabilities")
    return heads


def require_finite_scores(batch: MicroBatch, rows: LossOutput) -> None:
    """Refuse scores that are not finite, before any gradient reaches a model.

    A weight of zero does not help against them: 0 * NaN is NaN in the head's gradient. One
    reduction per tensor, and one copy to the host.

    Raises:
        UserError: naming the score and the first of its rows.
    """
    teacher = batch.teacher or NO_SCORES
    scores = {
        "the teacher's log-probabilities": rows.teacher_logprob_N,
        "the teacher's top-k log-probabilities": teacher.topk_logprobs_NK,
        "the teacher's entropies": rows.teacher_entropy_N,
        "the reference's log-probabilities": rows.reference_logprob_N,
        "the old log-probabilities": batch.old_logprob_N,
        "the old log-probabilities of tokens": batch.old_token_logprob_N,
        "the given advantages": batch.given_advantage_N,
    }
    finite = {name: torch.isfinite(x) for name, x in scores.items() if x is not None}
    all_finite = cast("list[bool]", torch.stack([x.all() for x in finite.values()]).tolist())
    for (name, x), fine in zip(finite.items(), all_finite, strict=True):
        if not fine:
            first = int((~x.reshape(len(x), -1)).any(1).nonzero()[0])
            raise UserError(
                f"{name}: {int((~x).sum())} of {x.numel()} values are not finite, the first in "
                f"scored row {first}: no weight was moved. Check that model's checkpoint, its "
                "precision and its server"
            )


@dataclass(frozen=True)
class Component:
    """One component of a block's loss, [C] each."""

    value_C: Tensor  # weighted
    logprob_gradient_C: Tensor  # d value / d log pi of the target (policy: or its stop class)
    dense: DenseTerm | None = None  # the full-vocabulary part of the gradient
    kl_C: Tensor | None = None  # the divergence, unweighted
    advantage_C: Tensor | None = None
    clipped_C: Tensor | None = None


def old_logprob(batch: MicroBatch, target: TargetLogprobs) -> Tensor | None:
    """log pi_old [C] as the surrogate compares it; None: pi_old is the present policy.

    Where pi_old's probability of a stop class is unknown, the token's share of its class is taken
    from the present policy. The ratio is then that of the token, whose mean over pi_old is that of
    the class: still exact, and 1 on policy.
    """
    if batch.old_logprob_N is not None or batch.old_token_logprob_N is None:
        return batch.old_logprob_N
    return batch.old_token_logprob_N + (target.logprob_C - target.token_logprob_C)


def token_advantage(
    terms: Terms, batch: MicroBatch, behaviour_C: Tensor, teacher_logprob_C: Tensor | None
) -> Tensor:
    """A of every token by itself: no discounted sum, no baseline."""
    assert terms.advantage is not None
    given_C = batch.given_advantage_N
    return terms.advantage(behaviour_C, teacher_logprob_C, given_C, terms.settings)


def surrogate(
    batch: MicroBatch, target: TargetLogprobs, advantage_C: Tensor, clip: float
) -> Component:
    """The clipped surrogate on the sampled tokens."""
    weight_C = batch.pg_weight_N
    loss_C, derivative_C, clipped_C = clipped_surrogate(
        target.logprob_C, old_logprob(batch, target), advantage_C, clip
    )
    return Component(
        value_C=weighted(weight_C, loss_C),
        logprob_gradient_C=weighted(weight_C, derivative_C),
        advantage_C=advantage_C.masked_fill(weight_C == 0, 0),
        clipped_C=clipped_C & (weight_C != 0),
    )


def sampled_kl(
    estimator: str, batch: MicroBatch, logprob_C: Tensor, reference_logprob_C: Tensor
) -> Component:
    """The KL to the reference from the sampled token alone, log pi of it given
    (docs/method.md §2).

    "k3": r - log r - 1 with r = pi_ref / pi, linear beyond K3_BOUND. "k3+": its value, with the
    gradient of (log r)^2 / 2. Both are weighted by pi / pi_old, held constant, where pi_old is
    given.
    """
    log_ratio_C = reference_logprob_C - logprob_C
    bounded_C = log_ratio_C.clamp(max=K3_BOUND)
    ratio_C = bounded_C.exp()
    kl_C = (ratio_C - bounded_C - 1) + (ratio_C - 1) * (log_ratio_C - bounded_C)
    derivative_C = 1 - ratio_C if estimator == "k3" else -log_ratio_C
    weight_C = batch.kl_weight_N
    if batch.old_token_logprob_N is not None:
        old_C = batch.old_token_logprob_N.to(logprob_C.dtype)
        weight_C = weighted(weight_C, (logprob_C - old_C).clamp(max=K3_BOUND).exp())
    return Component(weighted(weight_C, kl_C), weighted(weight_C, derivative_C), kl_C=kl_C)


def weighted(weight_C: Tensor, value_C: Tensor) -> Tensor:
    """weight * value, and exactly zero where the weight is, whatever the value."""
    return (weight_C * value_C).masked_fill(weight_C == 0, 0)


def teacher_over_student(
    behaviour_logprob_C: Tensor,
    teacher_logprob_C: Tensor | None,
    given_C: Tensor | None,
    settings: AdvantageConfig,
) -> Tensor:
    """A = log pi_T - log pi_old, or pi_T^alpha - pi_old^alpha with settings.power; then clamped
    where settings.clamp is set.

    Raises:
        ValueError: the micro-batch carries no teacher scores.
    """
    if teacher_logprob_C is None:
        raise ValueError(
            "this objective needs teacher scores: attach them to the micro-batch first"
        )
    if settings.power is None:
        advantage_C = teacher_logprob_C - behaviour_logprob_C
    else:
        alpha = settings.power
        advantage_C = (alpha * teacher_logprob_C).exp() - (alpha * behaviour_logprob_C).exp()
    if settings.clamp is not None:
        advantage_C = advantage_C.clamp(-settings.clamp, settings.clamp)
    return advantage_C


def given_with_sample(
    behaviour_logprob_C: Tensor,
    teacher_logprob_C: Tensor | None,
    given_C: Tensor | None,
    settings: AdvantageConfig,
) -> Tensor:
    """The advantage that came with the sample (GRPO: from rewards); clamped where
    settings.clamp is set.

    Raises:
        ValueError: the micro-batch carries no advantages.
    """
    if given_C is None:
        raise ValueError(
            "this objective needs MicroBatch.given_advantage_N: pack with its token_weights"
        )
    if settings.clamp is not None:
        return given_C.clamp(-settings.clamp, settings.clamp)
    return given_C


def clipped_surrogate(
    logprob_C: Tensor, old_logprob_C: Tensor | None, advantage_C: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(rho A, clip(rho, 1 - clip, 1 + clip) A), its derivative by log pi, and where rho was
    clipped.

    old_logprob_C None: pi_old is the present policy, and rho is exactly 1 (docs/method.md §1).
    """
    if old_logprob_C is None:
        return -advantage_C, -advantage_C, torch.zeros_like(advantage_C, dtype=torch.bool)
    ratio_C = (logprob_C - old_logprob_C).exp()
    bounded_C = ratio_C.clamp(1 - clip, 1 + clip)
    clipped_C = ratio_C * advantage_C > bounded_C * advantage_C
    loss_C = -torch.minimum(ratio_C * advantage_C, bounded_C * advantage_C)
    derivative_C = (-ratio_C * advantage_C).masked_fill(clipped_C, 0)
    return loss_C, derivative_C, clipped_C


def return_to_go(
    values_N: Tensor,
    sample_index_N: Tensor,
    token_index_N: Tensor,
    discount: float,
    context_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum over t' >= t of discount^(t'-t) values_t' within each sample (docs/method.md §3).

    Tokens may come in any order; a sample's tokens must all be in this micro-batch, on this rank or
    on the others of `context_group`. Each round doubles the number of tokens summed, so there are
    log2(longest response) rounds. Discount 0 returns the values.
    """
    if discount == 0:
        return values_N
    if context_group is not None:
        rows = (values_N, sample_index_N, token_index_N)
        whole, mine = _gather_rows(
            torch.stack([row.double() for row in rows], dim=1), context_group
        )
        values, sample_index, token_index = whole.unbind(dim=1)
        sums = return_to_go(
            values.to(values_N.dtype), sample_index.long(), token_index.long(), discount
        )
        return sums[mine]
    if values_N.numel() == 0:
        return values_N
    samples, sample_N = cast("tuple[Tensor, Tensor]", sample_index_N.unique(return_inverse=True))
    length = int(token_index_N.max()) + 1
    sums_SL = values_N.new_zeros(len(samples), length)
    sums_SL[sample_N, token_index_N] = values_N
    reach = 1
    while reach < length:
        shifted_SL = torch.zeros_like(sums_SL)
        shifted_SL[:, :-reach] = sums_SL[:, reach:]
        sums_SL = sums_SL + discount**reach * shifted_SL
        reach *= 2
    return sums_SL[sample_N, token_index_N]


def _gather_rows(rows_NK: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, slice]:
    """The rows of all ranks, of which each may hold another number, and this rank's slice."""
    counts = [rows_NK.new_zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(counts, counts[0].new_tensor([len(rows_NK)]), group=group)
    lengths = cast("list[int]", torch.cat(counts).tolist())
    padded = F.pad(rows_NK, (0, 0, 0, max(lengths) - len(rows_NK)))
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    start = sum(lengths[: group.rank()])
    whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return whole, slice(start, start + len(rows_NK))
