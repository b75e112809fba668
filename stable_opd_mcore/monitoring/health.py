"""Health metrics of a step (docs/method.md §5): truncation, repetition, lengths, advantages, KLs.

`rollout_metrics` reads the rollouts of a step or of an evaluation. Every rank holds the global list
of them, so its result is global. `token_metrics` reads the per-token results of the loss; it covers
this rank's micro-batches and must be reduced over ranks. Neither runs a model.

Not here: sinks (sinks.py) and the detection of repetitive tokens (data/repetition.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stable_opd_mcore.config.evaluation import MonitoringConfig
from stable_opd_mcore.metrics import Max, Mean, Metrics, Same, Sum
from stable_opd_mcore.records import LossOutput, MicroBatch, Rollout, Sample

if TYPE_CHECKING:
    from torch import Tensor

PAPER_TAIL_CHARACTERS = 10_000
CHARACTERS_PER_TOKEN = 2.5  # low, so that a response of max_new_tokens exceeds the tail
ZLIB_LEVEL = 6


def is_repetitive(text: str, tail_characters: int, ratio: float) -> bool:
    """Whether the last `tail_characters` of `text` compress by more than `ratio` (§5).

    Texts of up to `tail_characters` characters are not repetitive. Lengths are in characters, the
    ratio is one of UTF-8 bytes.
    """
    if len(text) <= tail_characters:
        return False
    tail = text[-tail_characters:].encode("utf-8", "surrogatepass")
    return len(tail) / len(zlib.compress(tail, ZLIB_LEVEL)) > ratio


def repetition_rate(texts: Sequence[str], tail_characters: int, ratio: float) -> Mean:
    """Share of `texts` that are repetitive."""
    return Mean(sum(is_repetitive(text, tail_characters, ratio) for text in texts), len(texts))


def tail_characters(config: MonitoringConfig, max_new_tokens: int) -> int:
    """The configured tail L, or min(10,000, 2.5 x max_new_tokens) (docs/method.md §5)."""
    if config.repetition_tail_characters is not None:
        return config.repetition_tail_characters
    return max(1, min(PAPER_TAIL_CHARACTERS, int(CHARACTERS_PER_TOKEN * max_new_tokens)))


def rollout_metrics(
    rollouts: Sequence[Rollout],
    max_new_tokens: int,
    config: MonitoringConfig,
    area: str = "rollout",
) -> Metrics:
    """Health of a set of rollouts, under `<area>/...` ("rollout", "eval" or "eval_greedy").

    `rollouts` is the global list, the same on every rank: do not reduce the result over ranks.
    Unless the tail L is the paper's 10,000 characters, `repetition_rate_10k` is the rate at 10,000.
    Accuracy is over graded rollouts; None if there are none.
    """
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts], dtype=np.int64)
    texts = [rollout.text for rollout in rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    characters = tail_characters(config, max_new_tokens)
    metrics = {
        "response_length_mean": Mean(int(lengths.sum()), len(lengths)),
        "response_length_p50": _quantile(lengths, 50),
        "response_length_p95": _quantile(lengths, 95),
        "response_length_max": Max(float(lengths.max()) if len(lengths) else None),
        "truncation_rate": _share(rollout.finish_reason == "length" for rollout in rollouts),
        "abort_rate": _share(rollout.finish_reason == "abort" for rollout in rollouts),
        "repetition_rate": repetition_rate(texts, characters, config.repetition_ratio),
        "accuracy": Mean(sum(rewards), len(rewards)),
    }
    if characters != PAPER_TAIL_CHARACTERS:
        metrics["repetition_rate_10k"] = repetition_rate(
            texts, PAPER_TAIL_CHARACTERS, config.repetition_ratio
        )
    return Metrics({f"{area}/{name}": metric for name, metric in metrics.items()})


def sample_metrics(samples: Sequence[Sample]) -> Metrics:
    """Share of complete golden sequences in the global list of samples."""
    complete = [sample.source == "golden" and not sample.truncated for sample in samples]
    return Metrics({"batch/golden_complete_share": _share(complete)})


def token_metrics(outputs: Sequence[LossOutput], microbatches: Sequence[MicroBatch]) -> Metrics:
    """Metrics of the scored tokens of this rank's micro-batches; reduce them over ranks.

    Log-probabilities, advantages, entropies, KL to the teacher and the clip share are means over
    rollout tokens in the loss (`pg_weight_N` not 0), without golden and masked tokens. KL to the
    reference is over rows with a KL weight. Shares of repetitive and masked tokens are over all
    scored rollout tokens. The rollout gap compares the engine's log-probability of a token with
    `old_token_logprob_N`, or with the student's if that is None.

    `loss/*` are sums, like the loss. The total is the sum of the parts, because Megatron scales the
    loss tensor in place. A mean is None if no micro-batch has its values (no teacher, no
    reference). Costs one device synchronisation per micro-batch.
    """
    metrics = Metrics()
    for output, microbatch in zip(outputs, microbatches, strict=True):
        metrics = metrics | _token_metrics(output, microbatch)
    return metrics


def _token_metrics(output: LossOutput, microbatch: MicroBatch) -> Metrics:
    import torch

    pg_N = microbatch.pg_weight_N != 0
    golden_N = microbatch.sft_weight_N != 0
    trained_N = pg_N | golden_N | (microbatch.kl_weight_N != 0)
    means = _mean_terms(output, microbatch)
    zeros_N = torch.zeros_like(pg_N, dtype=torch.float64)
    values_RN = torch.stack(
        [zeros_N if values is None else values.detach().double() for values, _ in means.values()]
    )
    masks_RN = torch.stack(
        [torch.zeros_like(pg_N) if values is None else mask for values, mask in means.values()]
    )
    totals_R = torch.where(masks_RN, values_RN, 0.0).sum(dim=1)
    gaps_N = torch.where(pg_N, _engine_gap(output, microbatch), -1.0).double()
    abs_advantage_N = torch.where(pg_N, output.advantage_N.detach().abs(), 0.0).double()
    scalars = [
        output.pg.detach().double(),
        output.kl.detach().double(),
        output.sft.detach().double(),
        trained_N.sum().double(),
        (~golden_N).sum().double(),
        torch.where(microbatch.repetitive_N, abs_advantage_N, 0.0).sum(),
        abs_advantage_N.sum(),
        gaps_N.max() if len(gaps_N) else gaps_N.new_tensor(-1.0),
    ]
    numbers = torch.cat([totals_R, masks_RN.sum(dim=1).double(), torch.stack(scalars)]).tolist()

    rows = len(means)
    pg, kl, sft, trained, rollout, abs_repetitive, abs_total, gap_max = numbers[2 * rows :]
    mean_metrics = {
        key: Mean(total, count)
        for key, total, count in zip(means, numbers[:rows], numbers[rows : 2 * rows], strict=True)
    }
    return Metrics(
        {
            **mean_metrics,
            "loss/total": Sum(pg + kl + sft),
            "loss/pg": Sum(pg),
            "loss/kl": Sum(kl),
            "loss/sft": Sum(sft),
            "tokens/trained": Sum(trained),
            "tokens/rollout": Sum(rollout),
            "advantage/abs_sum_repetitive": Sum(abs_repetitive),
            "advantage/abs_sum_regular": Sum(abs_total - abs_repetitive),
            "advantage/abs_share_repetitive": Mean(abs_repetitive, abs_total),
            "logprob/rollout_gap_max": Max(None if gap_max == -1.0 else gap_max),
        }
    )


def _mean_terms(
    output: LossOutput, microbatch: MicroBatch
) -> dict[str, tuple[Tensor | None, Tensor]]:
    """key -> (values_N, or None if not computed; mask_N of the tokens in the mean)."""
    teacher, reference = microbatch.teacher, microbatch.reference
    pg_N = microbatch.pg_weight_N != 0
    golden_N = microbatch.sft_weight_N != 0
    trained_N = pg_N | golden_N | (microbatch.kl_weight_N != 0)
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
        "tokens/masked_share": (~pg_N, ~golden_N),
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


def _engine_gap(output: LossOutput, microbatch: MicroBatch) -> Tensor:
    """|engine's log-probability of the token - trainer's|, fp32 [N], nats."""
    trainer_N = microbatch.old_token_logprob_N
    if trainer_N is None or trainer_N is microbatch.rollout_logprob_N:
        trainer_N = output.token_logprob_N.detach()
    return (microbatch.rollout_logprob_N - trainer_N).abs()


def _share(flags: Iterable[bool]) -> Mean:
    flags = list(flags)
    return Mean(sum(flags), len(flags))


def _quantile(lengths: np.ndarray, percent: float) -> Same:
    return Same(float(np.percentile(lengths, percent)) if len(lengths) else None)
