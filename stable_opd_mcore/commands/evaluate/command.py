"""The command `evaluate`: its options."""

from pathlib import Path
from typing import Annotated

import typer

from stable_opd_mcore.commands.options import importing, interruptible, is_path, require_path


def evaluate(
    target: Annotated[
        Path,
        typer.Argument(
            help="A run's directory (its trained model), a Hugging Face directory, a Megatron "
            "checkpoint, a PEFT adapter, or a config (the trained model of its run)."
        ),
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(
            help="More targets, e.g. the runs of other seeds: then a table with means. "
            "Settings to change, e.g. evaluation.temperature=0"
        ),
    ] = None,
    benchmarks: Annotated[
        str | None,
        typer.Option(
            help="Names with commas: aime24, aime25, amc, math500, minerva, olympiadbench; or all."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings for a model of no run; default: the paper's evaluation."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only the first N problems of each set.")
    ] = None,
) -> None:
    """Evaluate a model: avg@k and pass@k with intervals, truncation, repetition, as tables."""
    targets = [target, *(Path(word) for word in more or [] if is_path(word))]
    for each in targets:
        require_path(each, "a config, a run's directory, a model's or a checkpoint's")
    if config is not None:
        require_path(config, "a config; configs/ holds examples")
    with importing():
        from stable_opd_mcore.commands.evaluate.evaluated_model import (
            evaluation_configs,
            named_benchmarks,
        )

    named = named_benchmarks(benchmarks) if benchmarks is not None else []
    overrides = [*named, *(word for word in more or [] if not is_path(word))]
    configs = evaluation_configs(targets, config, overrides)
    from stable_opd_mcore.commands.evaluate.evaluate import evaluate_config

    done: list[Path] = []
    with interruptible("the same command continues after the last stored part"):
        for settings in configs:
            others = done if settings is configs[-1] else []
            done.append(
                evaluate_config(
                    settings, typer.echo, show_progress=True, limit=limit, others=others
                )
            )
