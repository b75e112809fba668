"""Every metric a run may write: its key, its meaning and its unit.

The sinks refuse a key that is not listed here, and the report takes its descriptions from here. Not
here: the computation of values (monitoring/health.py, monitoring/throughput.py, train/).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    key: str
    meaning: str
    unit: str  # "" where the number has none


def _response_names(area: str, whose: str) -> list[Name]:
    """The metrics of a set of responses: rollouts, sampled evaluations or greedy evaluations."""
    return [
        Name(f"{area}/response_length_mean", f"mean length of {whose}", "tokens"),
        Name(f"{area}/response_length_p50", f"median length of {whose}", "tokens"),
        Name(f"{area}/response_length_p95", f"95th percentile of the length of {whose}", "tokens"),
        Name(f"{area}/response_length_max", f"longest of {whose}", "tokens"),
        Name(f"{area}/truncation_rate", f"share of {whose} cut by the length budget", "share"),
        Name(f"{area}/abort_rate", f"share of {whose} aborted by the engine", "share"),
        Name(f"{area}/loop_rate", f"share of {whose} that end in an exact loop", "share"),
        Name(f"{area}/loop_token_share", f"share of the tokens of {whose} in these loops", "share"),
        Name(f"{area}/loop_onset_mean", "mean place where these loops begin", "tokens"),
        *(
            Name(
                f"{area}/loop_token_share_q{quarter}",
                f"the same share in quarter {quarter} of the length budget",
                "share",
            )
            for quarter in (1, 2, 3, 4)
        ),
        Name(
            f"{area}/repetition_rate",
            f"share of {whose} with a tail that compresses beyond the configured ratio",
            "share",
        ),
        Name(
            f"{area}/repetition_rate_10k",
            f"the same with the paper's tail of 10,000 characters; 0 for shorter {whose}",
            "share",
        ),
        Name(f"{area}/accuracy", f"mean reward of the graded {whose}", "share"),
        *(
            Name(f"{area}/{name}_{part}", f"{meaning} of {whose} that {ended}", unit)
            for part, ended in (
                ("finished", "ended by themselves"),
                ("truncated", "were cut by the length budget"),
            )
            for name, meaning, unit in (
                ("accuracy", "mean reward", "share"),
                ("loop_rate", "loop rate", "share"),
                ("response_length_mean", "mean length", "tokens"),
            )
        ),
        Name(f"{area}/grading_timeouts", f"{whose} whose grading timed out: wrong", "responses"),
        Name(f"{area}/grading_crashes", f"{whose} whose grading crashed: wrong", "responses"),
    ]


def _split_names(key: str, what: str, unit: str) -> list[Name]:
    """A mean over rollout tokens, in parts of the responses."""
    parts = {
        "finished": "in responses that ended by themselves",
        "truncated": "in responses that did not",
        **{f"q{n}": f"in quarter {n} of the length budget" for n in (1, 2, 3, 4)},
    }
    return [Name(f"{key}_{part}", f"{what} {where}", unit) for part, where in parts.items()]


_ALL = [
    Name("loss/total", "loss whose gradient is applied: the sum of its parts", "nats"),
    Name("loss/pg", "policy-gradient (or direct distillation) part of the loss", "nats"),
    Name("loss/kl", "beta x KL(student || reference)", "nats"),
    Name("loss/sft", "lambda x negative log-likelihood of golden solutions", "nats"),
    Name("loss/moe_aux", "coefficient x loss that balances experts, sum of layers", ""),
    Name("grad_norm", "global gradient norm before clipping", ""),
    Name("optimizer/lr", "learning rate of the step", ""),
    *_response_names("rollout", "rollouts"),
    *_response_names("eval", "held-out responses"),
    *_response_names("eval_greedy", "greedy held-out responses"),
    Name(
        "batch/golden_complete_share",
        "share of samples that are complete golden solutions",
        "share",
    ),
    Name("logprob/student", "mean student log-probability of rollout tokens", "nats/token"),
    Name("logprob/teacher", "mean teacher log-probability of rollout tokens", "nats/token"),
    Name("logprob/reference", "mean reference log-probability of rollout tokens", "nats/token"),
    Name("logprob/golden", "mean student log-probability of golden tokens", "nats/token"),
    Name(
        "logprob/rollout_gap_mean", "mean |rollout engine - trainer| log-probability", "nats/token"
    ),
    Name("logprob/rollout_gap_max", "largest |rollout engine - trainer| log-probability", "nats"),
    Name("advantage/mean", "mean advantage of trained rollout tokens", "nats/token"),
    *_split_names("advantage/mean", "mean advantage", "nats/token"),
    Name("advantage/repetitive", "mean advantage inside repetitive tails", "nats/token"),
    Name("advantage/regular", "mean advantage outside repetitive tails", "nats/token"),
    Name("advantage/abs_sum_repetitive", "sum of |advantage| inside repetitive tails", "nats"),
    Name("advantage/abs_sum_regular", "sum of |advantage| outside repetitive tails", "nats"),
    Name("advantage/abs_share_repetitive", "share of sum |advantage| in repetitive tails", "share"),
    Name("tokens/trained", "tokens with a weight in any loss component", "tokens"),
    Name("tokens/rollout", "scored rollout tokens, masked ones included", "tokens"),
    Name("tokens/masked_share", "share of rollout tokens a mask keeps out of the loss", "share"),
    Name("tokens/repetitive_share", "share of rollout tokens inside repetitive tails", "share"),
    Name("tokens/golden_share", "share of trained tokens that are golden", "share"),
    Name("kl/teacher", "KL(student || teacher), sampled: mean log-ratio", "nats/token"),
    *_split_names("kl/teacher", "KL(student || teacher)", "nats/token"),
    Name(
        "kl/reference", "KL(student || reference) on visited prefixes, as in the loss", "nats/token"
    ),
    Name("kl/beta", "weight of the KL to the reference in the step", ""),
    Name("mixture/lambda", "weight of the golden solutions in the step", ""),
    Name("kl/reference_sampled", "KL(student || reference), sampled: mean log-ratio", "nats/token"),
    Name("entropy/student", "mean entropy of the student on visited prefixes", "nats"),
    *_split_names("entropy/student", "mean entropy of the student", "nats"),
    Name("entropy/teacher", "mean entropy of the teacher on visited prefixes", "nats"),
    Name("entropy/gap", "mean |teacher entropy - student entropy|", "nats"),
    Name(
        "overlap/ratio",
        "share of the 16 most probable tokens that student and teacher share",
        "share",
    ),
    Name("overlap/student_mass", "student's probability on the shared top tokens", "share"),
    Name("overlap/teacher_mass", "teacher's probability on the shared top tokens", "share"),
    Name(
        "overlap/advantage",
        "expected advantage on the shared top tokens, both models renormalised there",
        "nats",
    ),
    Name("stop/student_mass", "student's probability of stopping at the last position", "share"),
    Name("stop/teacher_mass", "teacher's probability of stopping at the last position", "share"),
    Name(
        "moe/load_max_over_mean",
        "positions of a layer's most chosen expert over the mean of its experts; mean of layers",
        "",
    ),
    Name(
        "moe/unused_experts",
        "experts of a layer that no trained position chose; mean of layers",
        "experts",
    ),
    Name(
        "moe/aux_loss", "E x sum of f_e P_e over a layer's experts, 1 if even; mean of layers", ""
    ),
    Name("ratio/clip_share", "share of rollout tokens at the clip bound", "share"),
    Name("importance/weight_mean", "mean trainer/engine probability ratio, as applied", ""),
    Name("importance/cut_share", "share of rollout tokens whose ratio was cut or dropped", "share"),
    Name("engine/failure", "failed requests and health checks of rollout servers", ""),
    Name("engine/restart", "rollout servers restarted", ""),
    Name("engine/retried", "requests repeated after a broken reply", "requests"),
    Name("engine/redrawn", "rollouts requested again after a failure", "responses"),
    Name("engine/stale", "rollouts dropped because their weights were too old", "responses"),
    Name("engine/resent", "times the weights were sent to a server again", ""),
    Name("engine/sync_bytes", "weights sent to rollout servers", "bytes"),
    Name("engine/prefix_cached_share", "prompt tokens found in the servers' prefix cache", "share"),
    Name("time/sync", "sending weights to the rollout engine", "s"),
    Name("time/rollout", "sampling and grading rollouts", "s"),
    Name("time/score", "teacher and reference scores", "s"),
    Name("time/update", "forward, backward and optimizer", "s"),
    Name("time/total", "the whole step", "s"),
    Name("time/eval", "held-out evaluation", "s"),
    Name(
        "throughput/tokens_per_second",
        "rollout batch (prompts + responses) over step time",
        "tokens/s",
    ),
    Name("memory/left_gib", "the trainer's memory on the GPU while colocated servers draw", "GiB"),
    Name(
        "memory/peak_gib",
        "peak memory since start: of the GPU, or of the process on a CPU",
        "GiB",
    ),
]

NAMES: dict[str, Name] = {name.key: name for name in _ALL}


def require_known(keys: Iterable[str]) -> None:
    """Check that every key is listed.

    Raises:
        ValueError: a key is not; the message names it.
    """
    unknown = sorted(set(keys) - NAMES.keys())
    if unknown:
        raise ValueError(
            f"unknown metrics {', '.join(unknown)}: describe them in monitoring/names.py"
        )
