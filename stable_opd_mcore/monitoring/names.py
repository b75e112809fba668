"""Every metric a run may write: its key, its meaning and its unit.

The sinks refuse a key that is not listed here, and the report takes its descriptions from here. Not
here: the computation of values (monitoring/health.py, monitoring/throughput.py, train/).
"""

from collections.abc import Iterable
from typing import NamedTuple

from stable_opd_mcore.config.rollouts import MAX_STALENESS


class Name(NamedTuple):
    meaning: str
    unit: str  # "" where the number has none


_PARTS = {
    "finished": "in responses that ended by themselves",
    "truncated": "in responses that did not",
    **{f"q{n}": f"in quarter {n} of the length budget" for n in (1, 2, 3, 4)},
}


def _parts(
    key: str, meaning: str, unit: str, parts: Iterable[str] = tuple(_PARTS)
) -> dict[str, tuple[str, str]]:
    """The metrics of `key` in parts of the responses."""
    return {f"{key}_{part}": (f"{meaning}, {_PARTS[part]}", unit) for part in parts}


def _split(key: str, meaning: str, unit: str) -> dict[str, tuple[str, str]]:
    """A mean over rollout tokens, in all and in parts of the responses."""
    return {key: (meaning, unit), **_parts(key, meaning, unit)}


def _of_responses(area: str, whose: str) -> dict[str, tuple[str, str]]:
    """The metrics of a set of responses: rollouts, sampled evaluations or greedy evaluations."""
    names = {
        "response_length_mean": (f"mean length of {whose}", "tokens"),
        "response_length_p50": (f"median length of {whose}", "tokens"),
        "response_length_p95": (f"95th percentile of the length of {whose}", "tokens"),
        "response_length_max": (f"longest of {whose}", "tokens"),
        "truncation_rate": (f"share of {whose} cut by the length budget", "share"),
        "abort_rate": (f"share of {whose} aborted by the engine", "share"),
        "loop_rate": (f"share of {whose} that end in an exact loop", "share"),
        "loop_token_share": (f"share of the tokens of {whose} in these loops", "share"),
        "loop_onset_mean": ("mean place where these loops begin", "tokens"),
        "repetition_rate": (f"share of {whose} with a tail beyond the compression ratio", "share"),
        "repetition_rate_10k": (
            "the same with the paper's tail of 10,000 characters; 0 if shorter",
            "share",
        ),
        "accuracy": (f"mean reward of the graded {whose}", "share"),
        "grading_timeouts": (f"{whose} whose grading timed out: wrong", "responses"),
        "grading_crashes": (f"{whose} whose grading crashed: wrong", "responses"),
        "grading_invalid": (f"{whose} with no reward in [0, 1]: wrong", "responses"),
    }
    for name in ("accuracy", "loop_rate", "response_length_mean"):
        names |= _parts(name, *names[name], ("finished", "truncated"))
    names |= _parts("loop_token_share", *names["loop_token_share"], ("q1", "q2", "q3", "q4"))
    return {f"{area}/{name}": value for name, value in names.items()}


_ALL: dict[str, tuple[str, str]] = {
    "loss/total": ("loss whose gradient is applied: the sum of its parts", "nats"),
    "loss/pg": ("policy-gradient (or direct distillation) part of the loss", "nats"),
    "loss/kl": ("beta x KL(student || reference)", "nats"),
    "loss/sft": ("lambda x negative log-likelihood of golden solutions", "nats"),
    "grad_norm": ("global gradient norm before clipping", ""),
    "optimizer/lr": ("learning rate of the step", ""),
    **_of_responses("rollout", "rollouts"),
    **_of_responses("eval", "held-out responses"),
    **_of_responses("eval_greedy", "greedy held-out responses"),
    "batch/golden_complete_share": ("share of samples that are complete golden solutions", "share"),
    "logprob/student": ("mean student log-probability of rollout tokens", "nats/token"),
    "logprob/teacher": ("mean teacher log-probability of rollout tokens", "nats/token"),
    "logprob/reference": ("mean reference log-probability of rollout tokens", "nats/token"),
    "logprob/golden": ("mean student log-probability of golden tokens", "nats/token"),
    "logprob/rollout_gap_mean": ("mean |rollout engine - trainer| log-probability", "nats/token"),
    "logprob/rollout_gap_max": ("largest |rollout engine - trainer| log-probability", "nats"),
    **_split("advantage/mean", "mean advantage of trained rollout tokens", "nats/token"),
    "advantage/repetitive": ("mean advantage inside repetitive tails", "nats/token"),
    "advantage/regular": ("mean advantage outside repetitive tails", "nats/token"),
    "advantage/abs_sum_repetitive": ("sum of |advantage| inside repetitive tails", "nats"),
    "advantage/abs_sum_regular": ("sum of |advantage| outside repetitive tails", "nats"),
    "advantage/abs_share_repetitive": ("share of sum |advantage| in repetitive tails", "share"),
    "tokens/trained": ("tokens with a weight in any loss component", "tokens"),
    "tokens/rollout": ("scored rollout tokens, masked ones included", "tokens"),
    "tokens/masked_share": ("share of rollout tokens a mask keeps out of the loss", "share"),
    "tokens/repetitive_share": ("share of rollout tokens inside repetitive tails", "share"),
    "tokens/golden_share": ("share of trained tokens that are golden", "share"),
    **_split("kl/teacher", "KL(student || teacher), sampled: mean log-ratio", "nats/token"),
    "kl/reference": ("KL(student || reference) on visited prefixes, as in the loss", "nats/token"),
    "kl/beta": ("weight of the KL to the reference in the step", ""),
    "mixture/lambda": ("weight of the golden solutions in the step", ""),
    "rollout/mixed_groups": (
        "share of prompts whose responses have not all the same weight versions",
        "share",
    ),
    "rollout/max_new_tokens": ("longest response that the step allows", "tokens"),
    "kl/reference_sampled": ("KL(student || reference), sampled: mean log-ratio", "nats/token"),
    **_split("entropy/student", "mean entropy of the student on visited prefixes", "nats"),
    "entropy/teacher": ("mean entropy of the teacher on visited prefixes", "nats"),
    "entropy/gap": ("mean |teacher entropy - student entropy|", "nats"),
    "overlap/ratio": ("share of the 16 most probable tokens that both models share", "share"),
    "overlap/student_mass": ("student's probability on the shared top tokens", "share"),
    "overlap/teacher_mass": ("teacher's probability on the shared top tokens", "share"),
    "overlap/advantage": (
        "expected advantage on the shared top tokens, models renormalised there",
        "nats",
    ),
    "stop/student_mass": ("student's probability of stopping at the last position", "share"),
    "stop/teacher_mass": ("teacher's probability of stopping at the last position", "share"),
    "moe/load_max_over_mean": (
        "load of a layer's most chosen expert over the mean; mean of layers",
        "",
    ),
    "moe/unused_experts": (
        "experts of a layer without a trained position; mean of layers",
        "experts",
    ),
    "ratio/clip_share": ("share of rollout tokens at the clip bound", "share"),
    "importance/weight_mean": ("mean trainer/engine probability ratio, as applied", ""),
    "importance/cut_share": ("share of rollout tokens whose ratio was cut or dropped", "share"),
    "engine/failure": ("failed requests and health checks of rollout servers", ""),
    "engine/restart": ("rollout servers restarted", ""),
    "engine/retried": ("requests repeated after a broken reply", "requests"),
    "engine/redrawn": ("rollouts requested again after a failure", "responses"),
    "engine/stale": ("rollouts dropped because their weights were too old", "responses"),
    "engine/continued": ("responses that were interrupted and went on", "responses"),
    "engine/resent": ("times the weights were sent to a server again", ""),
    "engine/sync_bytes": ("weights sent to rollout servers", "bytes"),
    "engine/prefix_cached_share": ("prompt tokens found in the servers' prefix cache", "share"),
    "time/sync": ("sending weights to the rollout engine", "s"),
    "time/rollout": ("sampling and grading rollouts", "s"),
    "time/wait": ("waiting for servers' responses and their scores, a part of time/rollout", "s"),
    "time/score": ("scores of teacher and reference in the trainer", "s"),
    "time/update": ("forward, backward and optimizer", "s"),
    "time/total": ("the whole step", "s"),
    "time/eval": ("held-out evaluation", "s"),
    "throughput/tokens_per_second": ("tokens of the rollout batch over step time", "tokens/s"),
    "perf/trainer_waited": (
        "share of the step that the trainer waits for servers: in time/wait and time/sync",
        "share",
    ),
    "perf/servers_waited": (
        "share of the step in which a rank had no request at a rollout server of its own and sent "
        "it no weights; mean of ranks and servers",
        "share",
    ),
    "perf/teacher_waited": (
        "share of the step in which a rank had no request at a teacher's server; mean of ranks "
        "and servers",
        "share",
    ),
    "perf/continued_share": (
        "share of responses that weights of several versions sampled",
        "share",
    ),
    **{
        f"perf/{key}_{age}": (f"share of {what} {age} updates older than those trained", "share")
        for age in range(MAX_STALENESS + 1)
        for key, what in (
            ("staleness", "responses whose first token is of weights"),
            ("tokens_age", "response tokens of weights"),
        )
    },
    "memory/left_gib": ("the trainer's memory on the GPU while colocated servers draw", "GiB"),
    "memory/peak_gib": ("peak memory since start: of the GPU, or of the process on a CPU", "GiB"),
}

# Of each source of data.train and each served teacher: source/<name>/<key>, teacher/<name>/<key>.
_OF_SOURCES = {
    "row_share": Name("share of the rollouts", "share"),
    "token_share": Name("share of the rollouts' tokens", "share"),
    "weight_share": Name("share of the policy term's weights, summed over tokens", "share"),
    "kl": Name("KL(student || teacher) on its rollouts", "nats/token"),
    "accuracy": Name("mean reward of its graded rollouts", "share"),
    "truncation_rate": Name("share of its rollouts cut by the length budget", "share"),
}
NAMES: dict[str, Name] = {key: Name(*value) for key, value in _ALL.items()}


def name_of(key: str) -> Name | None:
    """Meaning and unit of a metric; None of an unknown one."""
    area, _, rest = key.partition("/")
    if area in ("source", "teacher") and "/" in rest:
        return _OF_SOURCES.get(rest.rpartition("/")[2])
    return NAMES.get(key)


def require_known(keys: Iterable[str]) -> None:
    """Check that every key is listed.

    Raises:
        ValueError: a key is not; the message names it.
    """
    unknown = sorted(key for key in keys if name_of(key) is None)
    if unknown:
        raise ValueError(
            f"unknown metrics {', '.join(unknown)}: describe them in monitoring/names.py"
        )
