"""What a training run says on the terminal: what it loads, where it resumes, its steps, its end.

On a terminal the steps are one line that keeps its place: name, bar, count, time to the end, the
phase of the step and, as far as the width allows, numbers. Into a pipe or a file, and with
NO_COLOR, each step is a plain line. Now and then a rollout is shown. Everything goes to stderr,
from rank 0 alone.

Not here: metrics in files (monitoring/sinks.py) and what the guard says, which is logged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.records import Rollout

RECENT_STEPS = 20  # whose mean time gives the time left
WIDTH_OF_NAME_AND_BAR = 72  # a narrower terminal has neither
SAMPLE_HEAD, SAMPLE_TAIL = 300, 200  # characters of a response that is shown
HELD_OUT = "eval/accuracy"
NUMBERS = (  # key and form; the last ones are the first to be cut off
    ("loss/total", "loss {:.3g}"),
    ("throughput/tokens_per_second", "{:,.0f} tokens/s"),
    ("rollout/accuracy", "accuracy {:.3g}"),
    (HELD_OUT, "held-out {:.3g}"),
    ("rollout/truncation_rate", "truncated {:.3g}"),
    ("rollout/repetition_rate", "repetitive {:.3g}"),
    ("rollout/response_length_mean", "length {:.3g}"),
    ("grad_norm", "gradient {:.3g}"),
)
SAMPLE_EVERY = 20  # steps between rollouts that are shown


class Terminal:
    """Tells how a run goes. A context manager around its steps; `say` works before and after.

    Args:
        config: `run.name` and `train.steps` are read.
        shown: False says nothing.
        console: where; by default stderr.
    """

    def __init__(self, config: Config, shown: bool, console: Console | None = None):
        self._config = config
        self._console = console or Console(stderr=True)
        self._shown = shown
        self._name = config.run.name
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._numbers: dict[str, str] = {}
        self._ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._shown:
            self._console.print(Text(printable(text)), soft_wrap=True)

    def start(self, step: int) -> None:
        """The run stands after `step` and begins to train."""
        self._ends.append(time.monotonic())
        lives = self._console.is_terminal and not self._console.is_dumb_terminal
        if self._shown and lives and not self._console.no_color:
            # no thread that refreshes it: a checkpoint's writer is forked and may hold its lock
            self._bar = Progress(
                *self._columns(), console=self._console, auto_refresh=False, expand=True
            )
            self._task = self._bar.add_task(
                self._name,
                total=self._config.train.steps,
                completed=step,
                left=_time_left(None),
                phase="",
                numbers="",
            )
            self._bar.start()

    def phase(self, name: str) -> None:
        """The run begins this phase of a step, an evaluation or a save."""
        if self._bar is not None:
            self._bar.update(self._task, phase=name, refresh=True)

    def step_done(
        self, step: int, values: Mapping[str, float | None], rollouts: Sequence[Rollout]
    ) -> None:
        """`step` is finished; every SAMPLE_EVERY steps its first rollout is shown."""
        if not self._shown:
            return
        self._ends.append(time.monotonic())
        total = self._config.train.steps
        left = _time_left(seconds_left(list(self._ends), total - step))
        if step % SAMPLE_EVERY == 0 and rollouts:
            self.say(sample_text(step, rollouts[0]))
        new = _numbers(values)
        if self._bar is None:
            seconds = values.get("time/total")
            timing = [] if seconds is None else [f"{seconds:.1f} s"]
            texts = [f"{self._name} step {step}/{total}", *new.values(), *timing, left]
            self.say("  ".join(texts))
        else:  # where it keeps its place, the newest evaluation stays beside the newest step
            self._numbers = {key: self._numbers[key] for key in self._numbers if key == HELD_OUT}
            self._numbers |= new
            numbers = [self._numbers[key] for key, _ in NUMBERS if key in self._numbers]
            text = "  ".join(numbers)
            self._bar.update(self._task, completed=step, left=left, numbers=text, refresh=True)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.update(self._task, phase="")
            self._bar.stop()
            self._bar = None

    def _columns(self) -> list[TextColumn | BarColumn | MofNCompleteColumn]:
        """Of the line that keeps its place."""

        def text(field: str, max_width: int | None = None, ratio: int | None = None) -> TextColumn:
            column = Column(no_wrap=True, overflow="ellipsis", max_width=max_width, ratio=ratio)
            return TextColumn(f"{{task.{field}}}", table_column=column)

        is_wide = self._console.width >= WIDTH_OF_NAME_AND_BAR
        return [
            *([text("description", max_width=20), BarColumn(10)] if is_wide else []),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            text("fields[left]"),
            text("fields[phase]"),
            text("fields[numbers]", ratio=1),
        ]


def seconds_left(ends: Sequence[float], steps: int) -> float | None:
    """Steps that are left times the mean time between `ends`; None before the second one."""
    if len(ends) < 2:
        return None
    return max(0, steps) * (ends[-1] - ends[0]) / (len(ends) - 1)


def sample_text(step: int, rollout: Rollout) -> str:
    """A rollout in a few lines: its problem, the beginning and end of its response, its verdict."""
    verdict = {None: "not graded", True: "right", False: "wrong"}[
        None if rollout.reward is None else rollout.reward > 0
    ]
    ending = {"stop": "stopped", "length": "truncated", "abort": "aborted"}[rollout.finish_reason]
    facts = f"step {step}, {len(rollout.token_ids)} tokens, {ending}, {verdict}"
    if rollout.prompt.answer is not None:
        facts += f" (gold answer {rollout.prompt.answer[:SAMPLE_TAIL]})"
    problem, response = _shortened(rollout.prompt.text), _shortened(rollout.text)
    return f"--- a rollout of {facts}\n{problem}\n>>> {response}\n---"


def resume_text(config: Config, step: int) -> str:
    """Where the run starts and where its results go."""
    path: Path = config.run.path
    begin = f"resuming at step {step}" if step else "starting at step 0"
    return f"{begin} of {config.train.steps}; results in {path}; stable-opd watch {path} shows them"


def _shortened(text: str) -> str:
    if len(text) <= SAMPLE_HEAD + SAMPLE_TAIL:
        return text
    left_out = len(text) - SAMPLE_HEAD - SAMPLE_TAIL
    return f"{text[:SAMPLE_HEAD]} [... {left_out} characters ...] {text[-SAMPLE_TAIL:]}"


def _numbers(values: Mapping[str, float | None]) -> dict[str, str]:
    found = ((key, values.get(key), form) for key, form in NUMBERS)
    return {key: form.format(value) for key, value, form in found if value is not None}


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:-- left"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} left"
