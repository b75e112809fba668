"""What a training run says on the terminal: what it loads, where it resumes, its steps, its end.

On a terminal the steps are one line that keeps its place: name, count, bar, time left and, as far
as the width allows, numbers. Into a pipe or a file each step is a line. Now and then a rollout is
shown. Everything goes to stderr, from rank 0 alone.

Not here: metrics in files (monitoring/sinks.py) and what the guard says, which is logged.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.records import Rollout

RECENT_STEPS = 20  # whose mean time gives the time left
BAR_WIDTH = 10
NAME_WIDTH = 20
SAMPLE_HEAD, SAMPLE_TAIL = 300, 200  # characters of a response that is shown
NUMBERS = (  # key, name; the first ones are the last to be left out
    ("loss/total", "loss"),
    ("rollout/accuracy", "accuracy"),
    ("rollout/truncation_rate", "truncated"),
    ("rollout/repetition_rate", "repetitive"),
    ("rollout/response_length_mean", "length"),
    ("grad_norm", "gradient"),
)


class Terminal:
    """Tells how a run goes. A context manager around its steps; `say` works before and after.

    Args:
        config: `run.name`, `train.steps` and `monitoring.sample_every` are read.
        shown: False says nothing.
        console: where; by default stderr.
    """

    def __init__(self, config: Config, shown: bool, console: Console | None = None):
        self._config = config
        self._console = console or Console(stderr=True, soft_wrap=True)
        self._shown = shown
        self._live: Live | None = None
        self._ends: deque[float] = deque(maxlen=RECENT_STEPS + 1)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._shown:
            self._console.print(Text(printable(text)), soft_wrap=True)

    def start(self, step: int) -> None:
        """The run stands after `step` and begins to train."""
        if not self._shown:
            return
        self._ends.append(time.monotonic())
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
            self._show(step, {})

    def step_done(
        self, step: int, values: Mapping[str, float | None], rollouts: Sequence[Rollout]
    ) -> None:
        """`step` is finished; every `monitoring.sample_every` steps its first rollout is shown."""
        if not self._shown:
            return
        self._ends.append(time.monotonic())
        every = self._config.monitoring.sample_every
        if every and step % every == 0 and rollouts:
            self.say(sample_text(step, rollouts[0]))
        self._show(step, values)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, step: int, values: Mapping[str, float | None]) -> None:
        total = self._config.train.steps
        left = seconds_left(list(self._ends), total - step)
        name = printable(self._config.run.name)
        if self._live is not None:
            line = progress_line(name, step, total, left, values, self._console.width)
            self._live.update(Text(line, no_wrap=True, overflow="crop"), refresh=True)
        elif values:
            seconds = values.get("time/total")
            timing = "" if seconds is None else f"  {seconds:.1f} s"
            numbers = "  ".join(_numbers(values))
            self.say(f"{name} step {step}/{total}  {numbers}{timing}  {_time_left(left)}")


def progress_line(
    name: str,
    step: int,
    total: int,
    left: float | None,
    values: Mapping[str, float | None],
    width: int,
) -> str:
    """At most `width` characters. Numbers are left out first, then the bar, then the name."""
    if len(name) > NAME_WIDTH:
        name = name[: NAME_WIDTH - 1] + "\N{HORIZONTAL ELLIPSIS}"
    filled = BAR_WIDTH * step // max(1, total)
    bar = "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * filled
    bar += "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * (BAR_WIDTH - filled)
    count, timing = f"{step}/{total}", _time_left(left)
    for parts in ((name, bar, count, timing), (name, count, timing), (count, timing)):
        line = " ".join(parts)
        if len(line) <= width:
            break
    for number in _numbers(values):
        if len(line) + 2 + len(number) > width:
            break
        line += f"  {number}"
    return line[:width]


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


def _numbers(values: Mapping[str, float | None]) -> list[str]:
    found = ((name, values.get(key)) for key, name in NUMBERS)
    return [f"{name} {value:.3g}" for name, value in found if value is not None]


def _time_left(seconds: float | None) -> str:
    if seconds is None:
        return "-:--:-- left"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} left"
