"""`stable-opd demo`: train the models, run every arm with every seed, sum up, report.

Each piece of work is an ordinary training run (`train.loop.train`) in one of two worker processes,
one thread each; a run that has finished is not run again. Not here: what the runs are (recipe.py).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.demo.recipe import CAPTIONS, Job, demo_jobs
from stable_opd_mcore.demo.relabel import swap_stop_tokens
from stable_opd_mcore.demo.summary import ArmSummary, summarise
from stable_opd_mcore.monitoring.report import ReportRun, write_report

WORKERS = 2
POLL_SECONDS = 1.0


def run_demo(directory: Path, num_seeds: int) -> None:
    """Run all arms with seeds 0 .. num_seeds-1; write summary.json and report.html, print a table.

    Raises:
        ValueError: a run failed; the message is the run's own.
    """
    started = time.monotonic()
    jobs = demo_jobs(directory, range(num_seeds))
    run_jobs(jobs)
    arms = [summarise(job) for job in jobs if job.arm is not None]
    seconds = time.monotonic() - started
    summary, report = directory / "summary.json", directory / "report.html"
    records = [asdict(arm) for arm in arms]
    summary.write_text(json.dumps({"seconds": round(seconds), "arms": records}, indent=1))
    runs = [ReportRun(job.directory, job.arm, job.act) for job in jobs if job.arm and job.act]
    write_report(
        runs,
        report,
        title="On-policy distillation, collapsed and cured",
        summary=records,
        captions=CAPTIONS,
    )
    console = Console()
    console.print(summary_table(arms))
    console.print(f"{seconds:.0f} s. Curves: {report}  Numbers: {summary}")


def run_jobs(jobs: Sequence[Job]) -> None:
    """Run jobs in worker processes, each after those it builds on; two side by side."""
    waiting = {job.name: job for job in jobs}
    finished: set[str] = set()
    running: dict[Future, str] = {}
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the workers: two threads a run would fight
    spawn = multiprocessing.get_context("spawn")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with (
        ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool,
        Progress(*columns, console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task("demo", total=sum(job.steps for job in jobs))
        while waiting or running:
            for job in [job for job in waiting.values() if finished.issuperset(job.after)]:
                running[pool.submit(_work, job)] = waiting.pop(job.name).name
            done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()  # a failed run ends the demo with its own message
                finished.add(running.pop(future))
            names = ", ".join(sorted(name for future, name in running.items() if future.running()))
            bar.update(task, completed=sum(job.steps_done() for job in jobs), description=names)


def _work(job: Job) -> None:
    """In a worker: one job, unless its model is there already."""
    if job.model.is_dir():
        return
    if job.swap_from is not None:
        swap_stop_tokens(job.swap_from, job.model)
        return
    from stable_opd_mcore.train.loop import train

    train(parse_config(job.config, origin="the demo's recipe"), show_progress=False)


def summary_table(arms: Sequence[ArmSummary]) -> Table:
    table = Table(title="Accuracy on held-out problems, sampled at temperature 1")
    for heading in (
        "act",
        "arm",
        "seed",
        "start",
        "peak",
        "lowest after",
        "end",
        "truncation max",
        "end",
    ):
        table.add_column(heading, justify="left" if heading in ("act", "arm") else "right")
    for arm in arms:
        numbers = (
            arm.initial_accuracy,
            arm.peak_accuracy,
            arm.lowest_accuracy_after_peak,
            arm.final_accuracy,
            arm.max_truncation_rate,
            arm.final_truncation_rate,
        )
        table.add_row(arm.act, arm.arm, str(arm.seed), *(f"{number:.2f}" for number in numbers))
    return table
