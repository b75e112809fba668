"""Health metrics of a step's samples and tokens (docs/method.md §5): advantages, KLs, entropies.

`token_metrics` reads the per-token results of the loss; it covers this rank's micro-batches and
must be reduced over ranks. It runs no model. data/responses.py has the numbers of whole responses.

Shapes: B samples, N rows (scored tokens) of a micro-batch, R means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.responses import QUARTERS, turn_parts
from stable_opd_mcore.metrics import Max, Mean, Metrics, Sum
from stable_opd_mcore.records import LossOutput, MicroBatch
from stable_opd_mcore.sample_facts import SampleFacts

if TYPE_CHECKING:
    from torch import Tensor


class EpisodeLimits(NamedTuple):
    """How long the episode of each sample may be."""

    max_turns_B: NDArray[np.int64]
    max_new_tokens_B: NDArray[np.int64]  # of a turn


_NO_GROUPS: Mapping[str, NDArray[np.bool_]] = {}
SPLIT_KEYS = ("advantage/mean", "kl/teacher", "entropy/student")


def sample_metrics(facts: SampleFacts) -> Metrics:
    """Share of complete golden sequences, and of masked tokens among those of rollouts with the
    policy term. `facts` cover all samples, so do not reduce the result.
    """
    golden = int(facts.golden_B.sum())
    on_policy_B = ~facts.golden_B & ~facts.off_policy_B
    tokens = int(facts.sampled_tokens_B[on_policy_B].sum())
    trained = int(facts.trained_tokens_B[on_policy_B].sum())
    return Metrics(
        {
            "batch/golden_complete_share": Mean(golden, len(facts)),
            "tokens/masked_share": Mean(tokens - trained, tokens),
        }
    )


def token_metrics(
    outputs: Sequence[LossOutput],
    microbatches: Sequence[MicroBatch],
    max_new_tokens: int,
    groups: Mapping[str, NDArray[np.bool_]] = _NO_GROUPS,
    max_turns: int = 1,
    limits_B: EpisodeLimits | None = None,
) -> Callable[[], Metrics]:
    """Metrics of the scored tokens of this rank's micro-batches; reduce them over ranks.

    Log-probabilities, advantages, entropies, KL to the teacher and the clip share are means over
    rollout tokens in the loss (`pg_weight_N` not 0), without golden and masked tokens. KL to the
    reference is over rows with a KL weight, the share of repetitive tokens over all scored rollout
    tokens. Parts are finished and truncated turns, quarters of the longest episode, `max_turns` of
    `max_new_tokens` each, and, if there are several, single turns. `limits_B` are the limits of
    each sample's episode, with several sources; an episode of one turn is in no part by turn.
    The rollout gap is to `old_token_logprob_N`, or to the student's log-probability without one.

    `loss/*` are sums, like the loss. The total is the sum of the parts, because Megatron scales the
    loss tensor in place. A mean is None if no micro-batch has its values (no teacher, no
    reference, an objective without advantages).

    `groups` has for each key which samples of this rank, by MicroBatch.sample_index_N, belong to
    it; "<key>/kl" is their KL to the teacher. The function that is returned gives the metrics. It
    does not wait for the device if the host has waited since.
    """
    import torch

    from stable_opd_mcore.parallel.transfers import OnHost

    if not outputs:  # a pipeline stage before the last
        return Metrics
    pairs = zip(outputs, microbatches, strict=True)
    turns = max_turns, limits_B
    found = [_token_sums(*pair, max_new_tokens, groups, *turns) for pair in pairs]
    (means, scalars), _ = found[0]  # the keys are the same in every micro-batch
    numbers = OnHost(torch.stack([sums for _, sums in found]))

    def metrics() -> Metrics:
        total = Metrics()
        for of_batch in numbers.values().tolist():
            total = total | _metrics_of(means, scalars, of_batch)
        return total

    return metrics


def _token_sums(
    output: LossOutput,
    microbatch: MicroBatch,
    max_new_tokens: int,
    groups: Mapping[str, NDArray[np.bool_]],
    max_turns: int,
    limits_B: EpisodeLimits | None,
) -> tuple[tuple[list[str], list[str]], Tensor]:
    """The keys of the means and of the plain sums; in fp64 the totals and counts of the means, then
    the plain sums.
    """
    import torch

    golden_N, trained_N = microbatch.golden_N, _trained(microbatch)
    pg_N = (microbatch.pg_weight_N != 0) & ~golden_N
    means = _mean_terms(output, microbatch)
    parts = _parts(microbatch, max_new_tokens, max_turns, limits_B)
    for key in SPLIT_KEYS:
        values, mask = means[key]
        means |= {f"{key}_{part}": (values, mask & part_N) for part, part_N in parts.items()}
    kl_N, mask_N = means["kl/teacher"]
    for key, member_B in groups.items():
        means[f"{key}/kl"] = kl_N, mask_N & _by_row(member_B, microbatch)
    zeros_N = torch.zeros_like(pg_N, dtype=torch.float64)
    values_RN = torch.stack(
        [zeros_N if values is None else values.detach().double() for values, _ in means.values()]
    )
    masks_RN = torch.stack(
        [torch.zeros_like(pg_N) if values is None else mask for values, mask in means.values()]
    )
    totals_R = torch.where(masks_RN, values_RN, 0.0).sum(dim=1)
    gaps_N = torch.where(pg_N, _engine_gap(output, microbatch), -1.0).double()
    advantage_N = zeros_N if output.advantage_N is None else output.advantage_N.detach()
    abs_advantage_N = torch.where(pg_N, advantage_N.abs(), 0.0).double()
    scalars = {
        "pg": output.pg.detach().double(),
        "kl": output.kl.detach().double(),
        "sft": output.sft.detach().double(),
        "trained": trained_N.sum().double(),
        "rollout": (~golden_N).sum().double(),
        "abs_repetitive": torch.where(microbatch.repetitive_N, abs_advantage_N, 0.0).sum(),
        "abs_advantage": abs_advantage_N.sum(),
        "gap_max": gaps_N.max() if len(gaps_N) else gaps_N.new_full((), -1.0),
    }
    sums = torch.cat([totals_R, masks_RN.sum(dim=1).double(), torch.stack([*scalars.values()])])
    return ([*means], [*scalars]), sums


def _metrics_of(means: Sequence[str], scalars: Sequence[str], numbers: Sequence[float]) -> Metrics:
    """The metrics of one micro-batch's sums, which `_token_sums` has put in this order."""
    totals, counts = numbers[: len(means)], numbers[len(means) : 2 * len(means)]
    sums = dict(zip(scalars, numbers[2 * len(means) :], strict=True))
    abs_regular = sums["abs_advantage"] - sums["abs_repetitive"]
    return Metrics(
        {
            **{key: Mean(*mean) for key, *mean in zip(means, totals, counts, strict=True)},
            "loss/total": Sum(sums["pg"] + sums["kl"] + sums["sft"]),
            "loss/pg": Sum(sums["pg"]),
            "loss/kl": Sum(sums["kl"]),
            "loss/sft": Sum(sums["sft"]),
            "tokens/trained": Sum(sums["trained"]),
            "tokens/rollout": Sum(sums["rollout"]),
            "advantage/abs_sum_repetitive": Sum(sums["abs_repetitive"]),
            "advantage/abs_sum_regular": Sum(abs_regular),
            "advantage/abs_share_repetitive": Mean(sums["abs_repetitive"], sums["abs_advantage"]),
            "logprob/rollout_gap_max": Max(None if sums["gap_max"] == -1 else sums["gap_max"]),
        }
    )


def _mean_terms(
    output: LossOutput, microbatch: MicroBatch
) -> dict[str, tuple[Tensor | None, Tensor]]:
    """key -> (values_N, or None if not computed; mask_N of the tokens in the mean)."""
    teacher, reference = microbatch.teacher, microbatch.reference
    golden_N, trained_N = microbatch.golden_N, _trained(microbatch)
    pg_N = (microbatch.pg_weight_N != 0) & ~golden_N
    repetitive_N = microbatch.repetitive_N
    student_N, token_N = output.student_logprob_N.detach(), output.token_logprob_N.detach()
    reference_N = None if reference is None else output.reference_logprob_N.detach()
    teacher_N = teacher_entropy_N = None
    if teacher is not None:
        in_loss = teacher.logprob_N is None
        teacher_N = output.teacher_logprob_N
        teacher_entropy_N = output.teacher_entropy_N if in_loss else teacher.entropy_N
    advantage_N = output.advantage_N
    return {
        "logprob/student": (student_N, pg_N),
        "logprob/teacher": (teacher_N, pg_N),
        "logprob/reference": (reference_N, pg_N),
        "logprob/golden": (token_N, golden_N),
        "logprob/rollout_gap_mean": (_engine_gap(output, microbatch), pg_N),
        "advantage/mean": (advantage_N, pg_N),
        "advantage/repetitive": (advantage_N, pg_N & repetitive_N),
        "advantage/regular": (advantage_N, pg_N & ~repetitive_N),
        "tokens/repetitive_share": (repetitive_N, ~golden_N),
        "tokens/golden_share": (golden_N, trained_N),
        "kl/teacher": (None if teacher is None else output.kl_teacher_N, pg_N),
        "kl/reference": (output.kl_reference_N, microbatch.kl_weight_N != 0),
        "kl/reference_sampled": (None if reference_N is None else token_N - reference_N, pg_N),
        "entropy/student": (output.entropy_N, pg_N),
        "entropy/teacher": (teacher_entropy_N, pg_N),
        "entropy/gap": (
            None
            if teacher_entropy_N is None
            else (teacher_entropy_N - output.entropy_N.detach()).abs(),
            pg_N,
        ),
        "ratio/clip_share": (output.ratio_clipped_N, pg_N),
    }


def _trained(microbatch: MicroBatch) -> Tensor:
    """Rows [N] with a weight in any component of the loss."""
    weights = (microbatch.pg_weight_N, microbatch.kl_weight_N, microbatch.sft_weight_N)
    return (weights[0] != 0) | (weights[1] != 0) | (weights[2] != 0)


def _parts(
    microbatch: MicroBatch,
    max_new_tokens: int,
    max_turns: int,
    limits_B: EpisodeLimits | None,
) -> dict[str, Tensor]:
    """Masks [N] of finished and truncated turns, of quarters of the budget, and of some turns."""
    turn_N, most_N, budget_N = microbatch.turn_N, max_turns, max_new_tokens
    if limits_B is not None:
        most_N, budget_N = (_by_row(each_B, microbatch) for each_B in limits_B)
    place_N = turn_N * budget_N + microbatch.index_in_turn_N
    quarter_N = (4 * place_N // (most_N * budget_N)).clamp(max=len(QUARTERS) - 1)
    return {
        "finished": ~microbatch.truncated_N,
        "truncated": microbatch.truncated_N,
        **{quarter: quarter_N == number for number, quarter in enumerate(QUARTERS)},
        **{
            part: (turn_N >= turns.start) & (turn_N < turns.stop) & (most_N > 1)
            for part, turns in turn_parts(max_turns).items()
        },
    }


def _by_row(values_B: NDArray[Any], microbatch: MicroBatch) -> Tensor:
    """[N], the value of each row's sample."""
    import torch

    return torch.from_numpy(values_B).to(microbatch.turn_N.device)[microbatch.sample_index_N]


def _engine_gap(output: LossOutput, microbatch: MicroBatch) -> Tensor:
    """|engine's log-probability of the token - trainer's|, fp32 [N], nats."""
    trainer_N = microbatch.old_token_logprob_N
    if trainer_N is None or trainer_N is microbatch.rollout_logprob_N:
        trainer_N = output.token_logprob_N.detach()
    return (microbatch.rollout_logprob_N - trainer_N).abs()
