"""Evaluate the student on held-out prompts: while it trains, and on its own by the command line.

Not here: sampling, grading or counting (evaluation/), which know nothing of a run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from stable_opd_mcore.atomic_files import write_atomically
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.rollout_files import write_rollouts
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stable_opd_mcore.evaluation.evaluate import (
    EvaluationResult,
    evaluate,
    evaluation_sampling,
)
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.evaluation.table import plain_values, results_table
from stable_opd_mcore.metrics import Max, Metrics, reduce_over_ranks
from stable_opd_mcore.monitoring.health import is_repetitive, rollout_metrics, tail_characters
from stable_opd_mcore.parallel.world import (
    World,
    gather_objects,
    start_world,
    stop_world,
)
from stable_opd_mcore.records import Prompt
from stable_opd_mcore.rollout.build import embedded_engine
from stable_opd_mcore.rollout.engine import RolloutEngine, Sampling
from stable_opd_mcore.train.setup import (
    configured_architecture,
    held_out_prompts,
    load_held_out,
    load_student,
    load_tokenizer,
)
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.step import Run, grade


def evaluate_student(run: Run, state: TrainState) -> Metrics:
    """`eval/*` metrics of the present weights, and `eval_greedy/*` where the config asks for both.

    The sampling noise is the same at every step: two evaluations differ by the weights alone.
    """
    assert run.held_out is not None
    prompts = run.held_out.select(range(len(run.held_out)))
    run.held_out_engine.publish(state.weight_version)
    metrics, counts, started = Metrics(), Metrics(), time.perf_counter()
    passes = (
        {"eval": False, "eval_greedy": True}
        if run.config.evaluation.also_greedy
        else {"eval": False}
    )
    for area, greedy in passes.items():
        sampling = evaluation_sampling(run.config, run.tokenizer.stop_token_ids, greedy=greedy)
        result = _evaluate(
            run.config, run.world, run.held_out_engine, run.grader, prompts, sampling
        )
        metrics = metrics | rollout_metrics(
            result.rollouts, sampling.max_new_tokens, run.config.monitoring, area
        )
        counts = counts | run.grader.take_metrics(area)
    seconds = Metrics({"time/eval": Max(time.perf_counter() - started)})
    return metrics | reduce_over_ranks(counts | seconds, dist.group.WORLD)


def evaluate_config(config: Config, tell: Callable[[str], None]) -> None:
    """Evaluate the student on `evaluation.benchmarks`, or on `data.eval` where it names none.

    Writes the responses (evaluation/<name>.jsonl) and their numbers (evaluation.json) to the run
    directory, and tells the table of results once.

    Raises:
        UserError: no held-out problems, or a model or data that do not fit.
    """
    world = start_world(config.parallel, config.train.seed)
    tokenizer = load_tokenizer(config)
    problems = _problems(config, tokenizer)
    engine = embedded_engine(world, load_student(config, world, tokenizer), tokenizer)
    directory = config.run.path
    results, values = {}, {}
    with Grader(config.evaluation.grading_timeout_seconds) as grader:
        for name, (held_out, num_samples) in problems.items():
            prompts = held_out.select(range(len(held_out)))
            sampling = evaluation_sampling(
                config, tokenizer.stop_token_ids, num_samples=num_samples
            )
            result = _evaluate(config, world, engine, grader, prompts, sampling)
            if world.rank == 0:
                write_rollouts(directory / "evaluation" / f"{name}.jsonl", result.rollouts)
            results[name] = replace(result, rollouts=())  # long responses of six sets are gigabytes
            counts = reduce_over_ranks(grader.take_metrics("eval"), dist.group.WORLD)
            values[name] = plain_values(result) | {
                key.removeprefix("eval/"): count for key, count in counts.values_by_key().items()
            }
    if world.rank == 0:
        write_atomically(directory / "evaluation.json", json.dumps(values, indent=1).encode())
        tell(results_table(results))
    stop_world()


def _problems(config: Config, tokenizer: Tokenizer) -> dict[str, tuple[PromptSet, int]]:
    """What to evaluate on, by name, and how many responses to a prompt it is known by."""
    architecture = configured_architecture(config.student)
    if config.evaluation.benchmarks:
        return {
            name: (
                held_out_prompts(
                    load_benchmark(name, config.evaluation.benchmark_directory),
                    config,
                    tokenizer,
                    architecture,
                ),
                BENCHMARKS[name].num_samples,
            )
            for name in config.evaluation.benchmarks
        }
    held_out = load_held_out(config, tokenizer, architecture)
    if held_out is None:
        raise ConfigError("nothing to evaluate on: set evaluation.benchmarks or data.eval.path")
    return {"held_out": (held_out, 1)}


def _evaluate(
    config: Config,
    world: World,
    engine: RolloutEngine,
    grader: Grader,
    prompts: Sequence[Prompt],
    sampling: Sampling,
) -> EvaluationResult:
    characters = tail_characters(config.monitoring, sampling.max_new_tokens)
    return evaluate(
        engine,
        prompts,
        sampling,
        step=0,
        grade=partial(grade, world, grader),
        is_repetitive=partial(
            is_repetitive, tail_characters=characters, ratio=config.monitoring.repetition_ratio
        ),
        gather=partial(gather_objects, group=world.data_group),
        data_rank=world.data_rank,
        data_size=world.data_size,
        prompts_per_batch=max(1, 256 // sampling.num_samples),
    )
