"""The command `demo`: its options."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 1,
    directory: Annotated[Path, typer.Option(help="Where runs and report go.")] = Path("runs/demo"),
    agents: Annotated[bool, typer.Option("--agents", help="With an environment, too.")] = False,
) -> None:
    """Watch plain on-policy distillation collapse and Stable-OPD hold, on this machine's CPU."""
    from stable_opd_mcore.commands.demo.runner import run_demo

    run_demo(directory, seeds, agents)
