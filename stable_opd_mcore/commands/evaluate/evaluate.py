"""What the command `evaluate` does: sample, grade and store responses of a finished model.

Connects a config, a world and an engine to the functions of evaluation/, which grade and count.
Not here: which model is evaluated (evaluated_model.py); evaluations in training
(train/held_out.py).
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from stable_opd_mcore.commands.evaluate.evaluated_model import evaluated_config, find_model
from stable_opd_mcore.commands.evaluate.store import ResponseStore
from stable_opd_mcore.commands.evaluate.table import markdown, markdown_table, results_table
from stable_opd_mcore.commands.report.chosen_runs import evaluated_runs, seeds_together
from stable_opd_mcore.commands.report.tables import benchmark_table
from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.environment_names import environments_of
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS, load_benchmark
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.evaluation.results import (
    BenchmarkResult,
    average,
    benchmark_result,
    evaluation_sampling,
    require_answers,
)
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.run_directory import DONE, REQUEUE
from stable_opd_mcore.inputs.loading import (
    configured_architecture,
    configured_held_out,
    held_out_prompts,
    load_tokenizer,
)
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.peft_directory import is_adapter
from stable_opd_mcore.models.files.peft_loading import merge_adapter
from stable_opd_mcore.models.weights import weights_hash
from stable_opd_mcore.parallel.world import World, on_first_rank, stop_world
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.build_engine import evaluation_engine
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train.held_out import parts_of, sample_held_out
from stable_opd_mcore.train.oversight.signals import Stopped, StopSignals, write_outcome
from stable_opd_mcore.train.persistence.checkpoint import merge_factors
from stable_opd_mcore.train.persistence.resolved_configs import take_directory
from stable_opd_mcore.train.persistence.rollout_writer import write_together
from stable_opd_mcore.train.persistence.stored_models import StoredModel
from stable_opd_mcore.train.run_models import load_model
from stable_opd_mcore.train.setup import start_configured_world

_DECIDE_EPISODES = {"function", "max_turns", "history", "max_observation_tokens"}


def evaluate_config(
    config: Config,
    print_line: Callable[[str], None],
    show_progress: bool = False,
    limit: int | None = None,
    others: Sequence[Path] = (),
) -> Path:
    """Evaluate a model on `evaluation.benchmarks`, or on `data.eval` where there are none.

    The model is `evaluation.model`, or the trained one of the config's run. Writes every response
    (`responses/<name>/`) and the numbers (`results.json`, `.md`) to the evaluation's directory,
    `<run>/evaluation/<name>`, which it returns, and prints the table of results on rank 0. Started
    again after a kill, it continues after the last stored part, and the files are the same.

    Args:
        limit: evaluate the first problems of each set only; the directory's name says so.
        others: directories of other evaluations; a table of their results and these is printed,
            with means over the runs that differ only in their seed.

    Raises:
        Stopped: a signal stopped it between two parts.
        UserError: no such model, no held-out problems, a model or data that do not fit together,
            responses of another evaluation in the directory, or lost servers.
    """
    world = start_configured_world(config)
    home = config.evaluation_path
    with ExitStack() as stack:
        stop = stack.enter_context(StopSignals(world.device))
        model = find_model(config)
        if limit is not None:
            model = replace(model, name=f"{model.name}_first_{limit}")
        config = evaluated_config(config, model)
        on_first_rank(world, lambda: take_directory(stack, config.run.path, home))
        tokenizer = load_tokenizer(config)
        problems = _problems(config, tokenizer, limit)
        chunks = load_model(config, world, config.student, tokenizer.vocab_size, trainable=False)
        if not model.is_whole:
            merge = merge_adapter if is_adapter(model.path) else merge_factors
            merge(chunks, model.path)
        engine = stack.enter_context(closing(evaluation_engine(config, world, chunks, tokenizer)))
        grader = stack.enter_context(Grader())
        weights = weights_hash(chunks)
        evaluation = Evaluation(config, world, model, weights, engine, grader, problems)
        try:
            for name, problems in evaluation.problems.items():
                _sample(evaluation, name, problems, stop, show_progress)
        except Stopped as stopped:
            if stopped.reason.requeues:
                write_outcome(home, REQUEUE, None)
            stop_world()
            raise
        if world.rank == 0:
            _write_results(evaluation, print_line)
            if others:
                table = benchmark_table(seeds_together(evaluated_runs([*others, config.run.path])))
                assert table is not None
                print_line(markdown_table([table.columns, *table.rows]))
    write_outcome(home, DONE, step=None)
    stop_world()
    return config.run.path


@dataclass(frozen=True)
class Problems:
    prompts: list[Prompt]
    over_long: int  # problems that leave no room for a response
    sampling: Sampling


@dataclass(frozen=True)
class Evaluation:
    config: Config  # its run is the evaluation's directory, its student the model
    world: World
    model: StoredModel
    weights: str  # hash
    engine: RolloutEngine
    grader: Grader
    problems: dict[str, Problems]

    def result(self, name: str) -> BenchmarkResult:
        """The result of a set's stored responses."""
        problems = self.problems[name]
        own = {prompt.prompt_id: prompt for prompt in problems.prompts}
        # A stored response's prompt lacks fields, such as its environment.
        rollouts = (
            replace(rollout, prompt=own[rollout.prompt.prompt_id])
            for rollout in self.store(name).rollouts()
        )
        turns: dict[str | None, int] = {k: e.max_turns for k, e in self._environments(name).items()}
        return benchmark_result(rollouts, problems.sampling, problems.over_long, turns)

    def _environments(self, name: str) -> dict[str, EnvironmentConfig]:
        """The environments that play the set, by name."""
        played = {prompt.environment for prompt in self.problems[name].prompts}
        return {k: each for k, each in environments_of(self.config).items() if k in played}

    def store(self, name: str) -> ResponseStore:
        problems = self.problems[name]
        identity: dict[str, Any] = {
            "weights": self.weights,
            "engine": self.config.rollout.engine,
            "sampling": asdict(problems.sampling),
            "problems": _hash_of(problems.prompts),
            **_settings_of(configured_architecture(self.config.student)),
        }
        for key, environment in self._environments(name).items():
            code = hashlib.sha256(environment.read().source).hexdigest()
            settings = environment.model_dump(include=_DECIDE_EPISODES) | {"sha256": code}
            identity[f"environment {key}".strip()] = settings
        return ResponseStore(self.config.run.files.responses / name, identity)


def _problems(config: Config, tokenizer: Tokenizer, limit: int | None) -> dict[str, Problems]:
    if config.evaluation.benchmarks:
        directory = config.evaluation.benchmark_directory
        sets = {
            name: (load_benchmark(name, directory, limit), BENCHMARKS[name].num_samples)
            for name in config.evaluation.benchmarks
        }
    elif config.data.eval is not None:
        sets = {"held_out": (configured_held_out(config)[:limit], 1)}
    else:
        raise ConfigError(
            "nothing to evaluate on: give --benchmarks, or set evaluation.benchmarks or "
            "data.eval.path"
        )
    return {name: _encode(rows, config, tokenizer, k) for name, (rows, k) in sets.items()}


def _encode(rows: Sequence[Row], config: Config, tokenizer: Tokenizer, k: int) -> Problems:
    config = config.replaced(data={"overlong": "drop"})
    prompts = held_out_prompts(rows, config, tokenizer, configured_architecture(config.student))
    selected = prompts.select(range(len(prompts)))
    require_answers(selected)
    sampling = evaluation_sampling(config, tokenizer.stop_token_ids, num_samples=k)
    if (of_turn := selected[0].max_new_tokens) is not None:  # all have the same environment
        sampling = replace(sampling, max_new_tokens=of_turn)
    return Problems(selected, prompts.num_dropped, sampling)


def _sample(
    evaluation: Evaluation, name: str, problems: Problems, stop: StopSignals, show_progress: bool
) -> None:
    """Sample, grade and store the responses that are not stored yet."""
    world, sampling = evaluation.world, problems.sampling
    store = evaluation.store(name)
    first = on_first_rank(world, store.open)
    parts = parts_of(world, problems.prompts, sampling)
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    hidden = not show_progress or world.rank != 0
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as shown:
        total = len(problems.prompts)
        each = -(-total // len(parts))  # the last part has fewer
        task = shown.add_task(name, total=total, completed=first * each)
        for number in range(first, len(parts)):
            rollouts = sample_held_out(
                evaluation.engine, evaluation.grader, world, parts[number], sampling
            )
            write_together(store.path(number), rollouts, world)
            shown.update(task, completed=min(total, (number + 1) * each))
            if reason := stop.requested_on_any_rank():
                if world.rank == 0:
                    print(f"stopped in {name}; the same command continues there", file=sys.stderr)
                raise Stopped(0, reason, None)


def _write_results(evaluation: Evaluation, print_line: Callable[[str], None]) -> None:
    config, model = evaluation.config, evaluation.model
    results = {name: evaluation.result(name) for name in evaluation.problems}
    sampling = next(iter(evaluation.problems.values())).sampling
    record: dict[str, Any] = {
        "model": {
            "path": str(model.path),
            "run": model.run,
            "step": model.step,
            "weights_sha256": evaluation.weights,
        },
        "settings": {
            "engine": config.rollout.engine,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            "prompt_template": config.data.prompt_template,
            "system_prompt": config.data.system_prompt,
            "chat_template_kwargs": config.student.chat_template_kwargs
            if config.evaluation.chat_template_kwargs is None
            else config.evaluation.chat_template_kwargs,
        },
        "benchmarks": {name: result.record() for name, result in results.items()},
    }
    if len(results) > 1:
        mean, (low, high) = average(results)
        record["average"] = {"accuracy": mean, "accuracy_low": low, "accuracy_high": high}
    title = f"{model.run} step {model.step}" if model.run else model.name
    about = [
        f"weights: {model.path}, SHA-256 {evaluation.weights}",
        f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, "
        f"{sampling.max_new_tokens} new tokens, engine {config.rollout.engine}",
    ]
    files = config.run.files
    write_atomically(files.results, (json.dumps(record, indent=1) + "\n").encode())
    write_atomically(files.results_page, markdown(title, about, results).encode())
    print_line(f"{title}: {model.path}, weights {evaluation.weights[:12]}")
    print_line(results_table(results))
    print_line(f"{files.results}, {files.results_page.name}; responses: {files.responses}")


def _settings_of(architecture: Architecture) -> dict[str, Any]:
    """What config.json and the student's settings say, such as YaRN: weights do not."""
    names = [field.name for field in fields(architecture) if field.compare]
    return {name: asdict(architecture)[name] for name in names}


def _hash_of(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of everything about the prompts that decides responses and verdicts."""
    digest = hashlib.sha256()
    for prompt in prompts:
        values = [prompt.prompt_id, prompt.token_ids, prompt.answer, prompt.answer_format]
        if prompt.environment is not None:
            values += [prompt.columns, prompt.messages]
        digest.update(json.dumps(values, default=repr).encode() + b"\n")
    return digest.hexdigest()
