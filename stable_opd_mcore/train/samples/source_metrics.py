"""Metrics of every source of `data.train` where there are several, and of every served teacher.

A source of a fifth of the prompts may have a hundredth of the tokens, and a teacher that gets no
rows looks healthy in the means over all. monitoring/health.py adds up KL by the same groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.partition import split_by_prompt
from stable_opd_mcore.data.sources import source_name
from stable_opd_mcore.losses.source_objectives import SourceObjectives
from stable_opd_mcore.metrics import Mean, Metric, Metrics
from stable_opd_mcore.monitoring.health import EpisodeLimits
from stable_opd_mcore.sample_facts import SampleFacts

Groups = Mapping[str, NDArray[np.bool_]]  # the first part of a metric's key -> which samples
NO_GROUPS: Groups = {}
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9._-]+")


def groups_of(config: Config, source_B: NDArray[np.int64] | None) -> Groups:
    """The samples of each source and of each teacher of several; none of one source."""
    if source_B is None:
        return NO_GROUPS
    groups: dict[str, NDArray[np.bool_]] = {}
    routes = config.teacher.routes if config.teacher else {}
    for number, source in enumerate(config.data.sources):
        name = source_name(source)
        keys = [f"source/{_NOT_IN_KEYS.sub('_', name)}"]
        if routes or config.teacher_of(source) is not None:
            keys.append(f"teacher/{_NOT_IN_KEYS.sub('_', source.teacher or name)}")
        for key in keys:
            groups[key] = groups.get(key, np.zeros(len(source_B), np.bool_)) | (source_B == number)
    return groups


def limits_of(config: Config, source_B: NDArray[np.int64] | None) -> EpisodeLimits | None:
    """The limits of each sample's episode; None with one source: those of the config for all."""
    if source_B is None:
        return None
    sources = config.data.sources
    turns = np.array([config.environment_of(each).longest for each in sources])
    return EpisodeLimits(turns[source_B], np.array([*map(config.budget_of, sources)])[source_B])


def source_metrics(config: Config, objective: SourceObjectives, facts: SampleFacts) -> Metrics:
    """Shares, accuracy and truncation of each group; `facts` are of all episodes: do not reduce it.

    Of the rollouts; of the golden solutions where the objective has no rollouts. The share of
    gradient weight is that of the sum over trained tokens of the weight of the policy term, or of
    sft.
    """
    groups, metrics = groups_of(config, facts.source_B), dict[str, Metric]()
    if not groups:
        return Metrics()
    assert facts.source_B is not None
    sampled = [objective.each[place].needs_rollouts for place in objective.of_source]
    is_sampled_B = np.array(sampled)[facts.source_B]
    counted_B = facts.golden_B != is_sampled_B
    weight_B = np.zeros(len(facts))
    for places in split_by_prompt(facts, config.train.minibatches):
        weights = objective.sample_weights(facts.select(places))
        weight_B[places] = np.where(is_sampled_B[places], weights.pg_B, weights.sft_B)
    shares = {
        "row_share": counted_B.astype(np.float64),
        "token_share": counted_B * facts.sampled_tokens_B,
        "weight_share": weight_B * facts.trained_tokens_B,
    }
    graded_B = counted_B & ~np.isnan(facts.reward_B)
    for key, member_B in groups.items():
        for name, values_B in shares.items():
            total = float(values_B.sum())
            metrics[f"{key}/{name}"] = Mean(float(values_B[member_B].sum()), total)
        own_B, of_B = counted_B & member_B, graded_B & member_B
        metrics[f"{key}/accuracy"] = Mean(float(facts.reward_B[of_B].sum()), int(of_B.sum()))
        turns = int(facts.turns_B[own_B].sum())
        cut = int(facts.truncated_turns_B[own_B].sum())
        metrics[f"{key}/truncation_rate"] = Mean(cut, turns)
    return Metrics(metrics)
