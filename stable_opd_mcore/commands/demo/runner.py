"""`stable-opd demo`: train the models, run every arm with every seed, write summary and report.

Each job is an ordinary training run (commands/train/train.py) in one of two worker processes with
one thread each. Finished runs are kept, and the same command continues with the others.
"""

import json
import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from stable_opd_mcore.commands.demo.agents import AGENT_TEXTS, agent_jobs, write_transcripts
from stable_opd_mcore.commands.demo.recipe import TEXTS, Job, demo_jobs
from stable_opd_mcore.commands.demo.summary import summarise, summary_table
from stable_opd_mcore.commands.report.chosen_runs import ReportRun
from stable_opd_mcore.commands.report.report import write_report
from stable_opd_mcore.config.load import load_config, parse_config
from stable_opd_mcore.data.synthetic import SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import atomic_directory, write_atomically
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.host.tensor_files import save_tensors
from stable_opd_mcore.host.worker_processes import end_with_parent

WORKERS = 2
POLL_SECONDS = 1.0
WEIGHTS = "model.safetensors"
TITLE_WIDTH = 28  # seed12 stable_opd_stop_class
# The logger's name, because this process does not load torch.
GUARD_LOGGER = "stable_opd_mcore.train.oversight.measures"


def run_demo(directory: Path, num_seeds: int = 1, agents: bool = False) -> None:
    """Run all arms with seeds 0 .. num_seeds-1, write summary.json and report.html, print a table.

    agents: the arms of agents.py, below `directory`/agents.

    Raises:
        UserError: a run failed, or the directory holds runs with other settings.
    """
    started = time.monotonic()
    directory = directory.resolve()
    if agents:
        directory /= "agents"
        jobs, texts = agent_jobs(directory, num_seeds), AGENT_TEXTS
        write_transcripts(jobs)
    else:
        jobs, texts = demo_jobs(directory, num_seeds), TEXTS
    run_jobs(jobs)
    arms = [summarise(job) for job in jobs if job.arm]
    summary, report = RunDirectory(directory).summary, RunDirectory(directory).report
    records = {"arms": [arm.record() for arm in arms]}
    write_atomically(summary, json.dumps(records, indent=1).encode())
    write_report(
        [ReportRun(job.directory, job.arm) for job in jobs if job.arm],
        report,
        title=texts.title,
        caption=texts.caption,
    )
    console = Console()
    console.print()
    console.print(summary_table(arms))
    console.print(texts.note, highlight=False)
    console.print(f"{time.monotonic() - started:.0f} s", highlight=False)
    console.print(f"curves   {report}\nnumbers  {summary}", highlight=False, soft_wrap=True)


def run_jobs(jobs: Sequence[Job]) -> None:
    """Run jobs in two worker processes, each after the jobs that it needs.

    Raises:
        UserError: a run failed, or a finished run has other settings; the message names the run.
    """
    finished = {job.name for job in jobs if job.model.is_dir()}
    for job in jobs:
        if job.name in finished and not _has_same_settings(job):
            raise UserError(
                f"{job.directory}: its settings are not those of this version's demo; remove it, "
                "or choose another --directory"
            )
    waiting = [job for job in jobs if job.name not in finished]
    not_reported = [job for job in waiting if job.arm]
    running: dict[Future, Job] = {}
    job_bars: dict[str, TaskID] = {}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # its runs are for CPUs, on any machine
    os.environ["OMP_NUM_THREADS"] = "1"  # more threads of the workers would compete for cores
    forks = multiprocessing.get_context("forkserver")
    # The workers import it once.
    forks.set_forkserver_preload(["stable_opd_mcore.commands.train.train"])
    with ProcessPoolExecutor(WORKERS, forks, end_with_parent) as pool, _progress() as bars:
        total = bars.add_task("all runs", total=sum(job.steps for job in jobs))
        while waiting or running:
            for job in [job for job in waiting if finished.issuperset(job.after)]:
                if len(running) < WORKERS:
                    waiting.remove(job)
                    running[pool.submit(_work, job)] = job
                    job_bars[job.name] = bars.add_task(_title(job), total=job.steps)
            for job in running.values():
                bars.update(job_bars[job.name], completed=job.steps_done())
            bars.update(total, completed=sum(job.steps_done() for job in jobs))
            done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                bars.remove_task(job_bars.pop(job.name))
                try:
                    future.result()
                except Exception as error:
                    others = " and ".join(other.name for other in running.values())
                    then = f", waiting for {others}" if others else ""
                    bars.console.print(f"{job.name} failed{then}", highlight=False)
                    raise UserError(
                        f"the demo's run {job.name} failed: {type(error).__name__}: {error}. "
                        "Finished runs are kept: the same command continues from there"
                    ) from error
                finished.add(job.name)
            while not_reported and not_reported[0].name in finished:  # keeps the order of the arms
                bars.console.print(_outcome(not_reported.pop(0)), highlight=False)
        bars.update(total, completed=sum(job.steps for job in jobs))


def _progress() -> Progress:
    """A bar for all steps of all runs, and one for each run in progress, on standard error."""
    return Progress(
        TextColumn("{task.description}", table_column=Column(width=TITLE_WIDTH, no_wrap=True)),
        BarColumn(bar_width=14),
        MofNCompleteColumn(table_column=Column(width=9, justify="right")),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _title(job: Job) -> str:
    return f"seed{job.seed} {job.directory.name}"


def _outcome(job: Job) -> str:
    """One line: accuracy at start, peak and end; the highest truncation rate."""
    found = summarise(job).outcome
    return (
        f"{_title(job):<{TITLE_WIDTH}} accuracy {found.initial_accuracy:.2f} → "
        f"{found.peak_accuracy:.2f} → {found.final_accuracy:.2f}  "
        f"truncation {found.max_truncation_rate:.2f}"
    )


def _has_same_settings(job: Job) -> bool:
    """Whether the run in the job's directory, if any, was made with the recipe's settings.

    Settings hold the paths of a run's models. In a demo that was copied or moved they name its old
    directory; they are compared as if they named the new one.
    """
    file = RunDirectory(job.directory).resolved
    if job.config is None or not file.is_file():
        return True
    settings, wanted = load_config(file), parse_config(job.config, origin="the demo's recipe")
    old, new = (
        json.dumps(str(one.run.path).removesuffix(job.name)).strip('"')
        for one in (settings, wanted)
    )
    text = json.dumps(settings.model_dump(mode="json", by_alias=True)).replace(old, new)
    return parse_config(json.loads(text), origin=str(file)) == wanted


def _work(job: Job) -> None:
    """Do one job in a worker process; a guard's warnings must not disturb the bars."""
    logging.getLogger(GUARD_LOGGER).setLevel(logging.ERROR)
    if job.swap_from is not None:
        swap_stop_tokens(job.swap_from, job.model, job.swapped)
        return
    from stable_opd_mcore.commands.train.train import train

    config = parse_config(job.config, origin="the demo's recipe")
    train(config, show_progress=False, accept_changes=_has_same_settings(job))


def swap_stop_tokens(source: Path, target: Path, swapped: Sequence[str]) -> None:
    """Copy a model, with the two stop tokens' rows of the `swapped` weights exchanged."""
    from safetensors.torch import load_file

    weights = load_file(source / WEIGHTS)
    first, second = VOCABULARY.index(STOP), VOCABULARY.index(SECOND_STOP)
    for name in swapped:
        weights[name][[first, second]] = weights[name][[second, first]]
    with atomic_directory(target) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        save_tensors(weights, partial / WEIGHTS)
