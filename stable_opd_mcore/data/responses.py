"""Turn graded responses into numbers: accuracy, truncation, repetition, length (docs/method.md §5).

`measure` reads one response, `ResponseTotals` adds measured responses up and holds none of them.
Each turn of an episode is a response; the reward is the episode's.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.data.repetition import (
    MIN_LOOP_TOKENS,
    PAPER_TAIL_CHARACTERS,
    TailLoop,
    is_repetitive,
    min_loop_tokens,
    tail_loop,
    tail_loop_of_text,
)
from stable_opd_mcore.data.thoughts import split_thought
from stable_opd_mcore.endings import CUT, Ending
from stable_opd_mcore.metrics import Max, Mean, Metric, Metrics, Quantile, Sum
from stable_opd_mcore.records import GradingFailure, Rollout

CHARACTERS_PER_TOKEN = 2.5  # low, so that a response of max_new_tokens exceeds the tail
# With fewer tokens than this a token may be one character, and a short tail compresses less.
SMALL_BUDGET = 128
SMALL_CHARACTERS_PER_TOKEN = 0.8
RATIO, SMALL_RATIO = 10.0, 2.0
QUARTERS = ("q1", "q2", "q3", "q4")  # parts of the length budget
_TURNS = {  # parts of the turns, counted from 0
    "turn_1": range(1),
    "turn_2": range(1, 2),
    "turn_3_4": range(2, 4),
    "turn_5_8": range(4, 8),
    "turn_9": range(8, sys.maxsize),
}
ONE_TURN: Mapping[str | None, int] = {}  # `max_turns` of rollouts without an environment
_PARTS: dict[Ending | None, str] = {Ending.STOP: "finished", **dict.fromkeys(CUT, "truncated")}
_MEANS = (
    "response_length_mean",
    "truncation_rate",
    "abort_rate",
    "accuracy",
    "repetition_rate",
    "repetition_rate_10k",
    "loop_rate",
    "loop_token_share",
    "loop_onset_mean",
    *(
        f"{name}_{part}"
        for name in ("accuracy", "loop_rate", "response_length_mean")
        for part in ("finished", "truncated")
    ),
    *(f"loop_token_share_{quarter}" for quarter in QUARTERS),
)
_OF_EPISODES = (
    "turns_mean",
    "episode_tokens_mean",
    "episode_truncation_rate",
    "repeated_turn_rate",
)
_ENDINGS = (Ending.STOP, Ending.TURNS, Ending.WINDOW, Ending.FAILED)  # of episodes
_BY_TURN = ("response_length_mean", "truncation_rate")


@dataclass(frozen=True)
class CompressionLimits:
    """When the detectors call a response repetitive."""

    tail_characters: int
    ratio: float  # UTF-8 bytes over zlib bytes of the tail
    min_loop_tokens: int = MIN_LOOP_TOKENS  # the tail loop's, the other detector


@dataclass(frozen=True)
class MeasuredResponse:
    """What one graded response adds to the numbers; without token ids, lengths in characters."""

    length: int
    finish_reason: Ending | None  # None: not known; "failed": there was no turn
    reward: float | None  # 0 to 1; None: not graded
    grading_failure: GradingFailure | None
    loop: TailLoop
    repetitive: bool | None  # its tail compresses too well; None: shorter than the tail
    repetitive_10k: bool | None  # the same for the paper's tail of 10,000 characters


def compression_limits(max_new_tokens: int) -> CompressionLimits:
    """The limits for responses of at most `max_new_tokens` (docs/method.md §5)."""
    per_token, ratio = CHARACTERS_PER_TOKEN, RATIO
    if max_new_tokens < SMALL_BUDGET:
        per_token, ratio = SMALL_CHARACTERS_PER_TOKEN, SMALL_RATIO
    characters = max(1, min(PAPER_TAIL_CHARACTERS, int(per_token * max_new_tokens)))
    return CompressionLimits(characters, ratio, min_loop_tokens(max_new_tokens))


def measure(
    text: str,
    token_ids: Sequence[int] | NDArray[np.int32] | None,
    limits: CompressionLimits,
    *,
    finish_reason: Ending | None,
    reward: float | None,
    grading_failure: GradingFailure | None = None,
) -> MeasuredResponse:
    """Measure a response from its text, without the stop token, and its ids, with it, if known."""
    repetitive = is_repetitive(text, limits.tail_characters, limits.ratio)
    same_tail = limits.tail_characters == PAPER_TAIL_CHARACTERS
    return MeasuredResponse(
        length=len(text) if token_ids is None else len(token_ids),
        finish_reason=finish_reason,
        reward=reward,
        grading_failure=grading_failure,
        loop=tail_loop_of_text(text)
        if token_ids is None
        else tail_loop(token_ids, min_length=limits.min_loop_tokens),
        repetitive=repetitive,
        repetitive_10k=repetitive
        if same_tail
        else is_repetitive(text, PAPER_TAIL_CHARACTERS, limits.ratio),
    )


class ResponseTotals:
    """Sums over measured responses. Its size grows with the number of different lengths only."""

    def __init__(
        self, max_length: int | None = None, max_turns: int = 1, *, has_environment: bool = False
    ):
        """The length budget of a response that `add` counts, None if there is none, and the most
        responses of any episode. Loops are counted in quarters of the budget of an episode.

        has_environment: an environment plays some of the rollouts.
        """
        self._max_length, self.max_turns = max_length, max_turns
        self._has_environment = has_environment
        self.num_responses = self._longest_episode = 0
        by_turn = [f"{name}_{part}" for name in _BY_TURN for part in turn_parts(max_turns)]
        endings = [f"ending_{ending}" for ending in _ENDINGS]
        names = (*_MEANS, *by_turn, *((*_OF_EPISODES, *endings) if has_environment else ()))
        self._means = dict.fromkeys(names, Mean(0.0, 0.0))
        self._lengths: Counter[int] = Counter()
        self._failures: Counter[GradingFailure | None] = Counter()

    def add(self, response: MeasuredResponse) -> None:
        """Count one more response."""
        self._add(response, response.finish_reason, self._max_length)

    def add_episode(
        self, rollout: Rollout, max_new_tokens: int, max_turns: int | None = None
    ) -> None:
        """Count the turns of one more rollout. It may have `max_turns` of `max_new_tokens` each;
        None: it has no environment and one turn."""
        limits = compression_limits(max_new_tokens)
        end, last = 0, rollout.turns[-1]
        for number, turn in enumerate(rollout.turns):
            start, end = end, end + turn.num_tokens
            response = measure(
                turn.text,
                rollout.token_ids[start:end],
                limits,
                finish_reason=turn.finish_reason,
                reward=rollout.reward if turn is last else None,
                grading_failure=rollout.grading_failure if turn is last else None,
            )
            self._add(response, rollout.finish_reason, max_new_tokens, number, max_turns or 1)
        if max_turns is not None:
            self._longest_episode = max(self._longest_episode, len(rollout.turns))
            for name, mean in _of_episode(rollout).items():
                self._means[name] = self._means.get(name, Mean(0.0, 0.0)) + mean

    def _add(
        self,
        response: MeasuredResponse,
        ending: Ending | None,
        max_length: int | None,
        turn: int = 0,
        max_turns: int = 1,
    ) -> None:
        """ending: why the episode ended; max_length: the response's budget; turn: its number."""
        self._failures[response.grading_failure] += 1
        if response.finish_reason == Ending.FAILED:
            self._means["accuracy"] += Mean(response.reward or 0.0, 1)
            return
        self.num_responses += 1
        self._lengths[response.length] += 1
        terms = {name: Mean(value, weight) for name, value, weight in _terms(response, ending)}
        if max_length is not None:
            terms |= _loop_shares(response, turn, max_length, max_turns)
        for part, turns in turn_parts(max_turns).items():
            if turn in turns:
                terms |= {f"{name}_{part}": terms[name] for name in _BY_TURN}
        for name, mean in terms.items():
            self._means[name] += mean

    def metrics(self, area: str) -> Metrics:
        """All metrics by their keys `<area>/<name>`; the mean of no values is None."""
        metrics: dict[str, Metric] = dict(self._means)
        lengths, counts = tuple(self._lengths), tuple(self._lengths.values())
        metrics["response_length_p50"] = Quantile(0.5, lengths, counts)
        metrics["response_length_p95"] = Quantile(0.95, lengths, counts)
        metrics["response_length_max"] = Max(float(max(self._lengths)) if self._lengths else None)
        if self._has_environment:
            metrics["turns_max"] = Max(float(self._longest_episode) or None)
        if self._means["accuracy"].count:
            metrics["grading_timeouts"] = Sum(float(self._failures["timeout"]))
            metrics["grading_crashes"] = Sum(float(self._failures["crash"]))
            metrics["grading_invalid"] = Sum(float(self._failures["invalid"]))
        return Metrics({f"{area}/{name}": metric for name, metric in metrics.items()})


def turn_parts(max_turns: int) -> dict[str, range]:
    """The ends of metrics' keys, and the turns, from 0, that each covers; none for one turn."""
    if max_turns == 1:
        return {}
    return {part: turns for part, turns in _TURNS.items() if turns.start < max_turns}


def rollout_metrics(
    rollouts: Iterable[Rollout],
    max_new_tokens: int,
    area: str = "rollout",
    max_turns: Mapping[str | None, int] = ONE_TURN,
) -> Metrics:
    """The numbers of this rank's rollouts under `<area>/...`; those of all ranks add up.

    max_new_tokens: of a turn, where the prompt does not say how many.
    max_turns: of the episodes of each environment; other rollouts have one turn.
    """
    most = max(max_turns.values(), default=1)
    totals = ResponseTotals(max_turns=most, has_environment=bool(max_turns))
    for rollout in rollouts:
        budget = rollout.prompt.max_new_tokens or max_new_tokens
        totals.add_episode(rollout, budget, max_turns.get(rollout.prompt.environment))
    return totals.metrics(area)


def version_metrics(
    rollouts: Sequence[Rollout], trained_version: int, max_staleness: int
) -> Metrics:
    """How many updates the weights that sampled `rollouts` are behind those that they train.

    `perf/staleness_<n>`: share of responses by the weights of their first token.
    `perf/continued_share`: share of responses that weights of several versions sampled.
    `rollout/mixed_groups`: share of prompts whose responses do not all have the same versions.

    trained_version is that of the weights that the step updates, max_staleness the largest n.
    """
    responses = Counter[int]()
    groups: dict[str, set[tuple[int, ...]]] = {}  # versions of the responses of each prompt
    for rollout in rollouts:
        versions = tuple(segment.weight_version for segment in rollout.segments)
        groups.setdefault(rollout.prompt.prompt_id, set()).add(versions)
        responses[trained_version - rollout.weight_version] += 1
    continued = sum(len(rollout.segments) > 1 for rollout in rollouts)
    mixed = sum(len(versions) > 1 for versions in groups.values())
    shares = {
        "perf/continued_share": Mean(continued, len(rollouts)),
        "rollout/mixed_groups": Mean(mixed, len(groups)),
    }
    for age in range(max_staleness + 1):
        shares[f"perf/staleness_{age}"] = Mean(responses[age], responses.total())
    return Metrics(shares)


def _of_episode(rollout: Rollout) -> dict[str, Mean]:
    answers = [split_thought(turn.text).answer for turn in rollout.turns]
    both = zip(answers, rollout.turns, strict=True)
    said = [(turn.text if answer is None else answer).strip() for answer, turn in both]
    endings = {f"ending_{each}": Mean(rollout.finish_reason == each, 1) for each in _ENDINGS}
    own = {f"own_{name}": Mean(value, 1) for name, value in rollout.metrics.items()}
    return (
        endings
        | own
        | {
            "turns_mean": Mean(len(said), 1),
            "episode_tokens_mean": Mean(len(rollout.token_ids), 1),
            "episode_truncation_rate": Mean(rollout.finish_reason in CUT, 1),
            "repeated_turn_rate": Mean(len(said) - len(set(said)), len(said)),
        }
    )


def _terms(response: MeasuredResponse, ending: Ending | None) -> Iterator[tuple[str, float, float]]:
    """(name, value, weight) of each mean that the response is part of; ending: its episode's."""
    length, loop = response.length, response.loop.length
    by_part: dict[str, tuple[float, Ending | None]] = {
        "loop_rate": (loop > 0, response.finish_reason),
        "response_length_mean": (length, response.finish_reason),
    }
    if response.reward is not None:
        by_part["accuracy"] = response.reward, ending
    for name, (value, reason) in by_part.items():
        yield name, value, 1
        if (part := _PARTS.get(reason)) is not None:
            yield f"{name}_{part}", value, 1
    yield "repetition_rate", bool(response.repetitive), 1
    yield "repetition_rate_10k", bool(response.repetitive_10k), 1
    yield "loop_token_share", loop, length
    if loop:
        yield "loop_onset_mean", length - loop, 1
    if response.finish_reason is not None:
        yield "truncation_rate", response.finish_reason == Ending.LENGTH, 1
        yield "abort_rate", response.finish_reason == Ending.ABORTED, 1


def _loop_shares(
    response: MeasuredResponse, turn: int, max_length: int, max_turns: int
) -> dict[str, Mean]:
    """The share of the response's tokens in its loop, for each quarter of the budget."""
    begin = turn * max_length  # its place in the budget of its episode
    onset, finish = begin + response.length - response.loop.length, begin + response.length
    shares: dict[str, Mean] = {}
    for number, quarter in enumerate(QUARTERS):
        first, last = (math.ceil(n * max_turns * max_length / 4) for n in (number, number + 1))
        start, end = max(begin, first), finish if quarter == QUARTERS[-1] else min(finish, last)
        shares[f"loop_token_share_{quarter}"] = Mean(
            max(0, end - max(start, onset)), max(0, end - start)
        )
    return shares
