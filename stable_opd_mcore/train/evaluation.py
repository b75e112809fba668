"""Evaluate the student on held-out prompts: during training, and for `stable-opd evaluate`.

Connects a run's config, world and engine to the functions of evaluation/, which sample, grade and
count. Not here: those functions, and when training evaluates (loop.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
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
from stable_opd_mcore.evaluation.evaluate import EvaluationResult, evaluate, evaluation_sampling
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.evaluation.table import plain_values, results_table
from stable_opd_mcore.metrics import Max, Metrics, reduce_over_ranks
from stable_opd_mcore.monitoring.health import is_repetitive, rollout_metrics, tail_characters
from stable_opd_mcore.parallel.world import World, stop_world
from stable_opd_mcore.records import Prompt
from stable_opd_mcore.rollout.build import evaluation_engine
from stable_opd_mcore.rollout.engine import RolloutEngine, Sampling
from stable_opd_mcore.train import phases
from stable_opd_mcore.train.setup import (
    configured_architecture,
    held_out_prompts,
    load_held_out,
    load_model,
    load_tokenizer,
    start_configured_world,
)
from stable_opd_mcore.train.signals import DONE, clear_outcome, write_outcome
from stable_opd_mcore.train.state import TrainState
from stable_opd_mcore.train.step import Run, draw_graded


def evaluate_student(run: Run, state: TrainState) -> Metrics:
    """`eval/*` metrics of the current weights, and `eval_greedy/*` with evaluation.also_greedy.

    The run's own engine samples. The embedded engine's noise is the same at every step, so two of
    its evaluations differ by the weights alone.
    """
    assert run.held_out is not None
    config = run.config
    prompts = run.held_out.select(range(len(run.held_out)))
    run.memory.keep_only(*phases.ROLLOUT)
    engine = run.held_out_engine or run.engine
    engine.publish(state.weight_version)
    metrics, counts, started = Metrics(), Metrics(), time.perf_counter()
    for area, greedy in (("eval", False), ("eval_greedy", True)):
        if greedy and not config.evaluation.also_greedy:
            continue
        sampling = evaluation_sampling(config, run.tokenizer.stop_token_ids, greedy=greedy)
        result = _evaluate(config, run.world, engine, run.grader, prompts, sampling)
        metrics = metrics | rollout_metrics(
            result.rollouts, sampling.max_new_tokens, config.monitoring, area
        )
        counts = counts | run.grader.take_metrics(area)
    seconds = Metrics({"time/eval": Max(time.perf_counter() - started)})
    return metrics | reduce_over_ranks(counts | seconds, dist.group.WORLD)


def evaluate_config(config: Config, print_line: Callable[[str], None]) -> None:
    """Evaluate the student on `evaluation.benchmarks`, or on `data.eval` where there are none.

    Writes the responses (evaluation/<name>.jsonl) and their numbers (evaluation.json) to the run
    directory, and prints the table of results on rank 0.

    Raises:
        UserError: no held-out problems, a model or data that do not fit together, or lost servers.
    """
    world = start_configured_world(config)
    tokenizer = load_tokenizer(config)
    problems = _problems(config, tokenizer)
    student = load_model(config, world, config.student, tokenizer.vocab_size, trainable=False)
    engine = evaluation_engine(config, world, student, tokenizer)
    directory = config.run.path
    if world.rank == 0:
        clear_outcome(directory)
    results, values = {}, {}
    with closing(engine), Grader(config.evaluation.grading_timeout_seconds) as grader:
        for name, (held_out, num_samples) in problems.items():
            prompts = held_out.select(range(len(held_out)))
            sampling = evaluation_sampling(
                config, tokenizer.stop_token_ids, num_samples=num_samples
            )
            result = _evaluate(config, world, engine, grader, prompts, sampling)
            if world.rank == 0:
                write_rollouts(directory / "evaluation" / f"{name}.jsonl", result.rollouts)
            results[name] = replace(result, rollouts=())  # six sets of long responses are gigabytes
            counts = reduce_over_ranks(grader.take_metrics("eval"), dist.group.WORLD)
            values[name] = plain_values(result) | {
                key.removeprefix("eval/"): count for key, count in counts.values_by_key().items()
            }
    if world.rank == 0:
        write_atomically(directory / "evaluation.json", json.dumps(values, indent=1).encode())
        print_line(results_table(results))
    write_outcome(directory, DONE, step=None)
    stop_world()


def _problems(config: Config, tokenizer: Tokenizer) -> dict[str, tuple[PromptSet, int]]:
    """Each set's name -> its prompts, and its responses per prompt where the config has none."""
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
        lambda batch: draw_graded(engine, grader, world, batch, sampling, step=0),
        prompts,
        is_repetitive=partial(
            is_repetitive, tail_characters=characters, ratio=config.monitoring.repetition_ratio
        ),
        prompts_per_batch=world.data_size * max(1, 256 // sampling.num_samples),
    )
