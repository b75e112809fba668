"""What a training run says on the terminal: what it loads, where it resumes, its steps, its end.

Each step is a line, and now and then a rollout is shown. A terminal also has a bar; a pipe, a file
and NO_COLOR have none. Everything goes to stderr, from rank 0 only.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.endings import ENDED
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.records import Rollout

SAMPLE_HEAD, SAMPLE_TAIL = 300, 200  # characters of a response that is shown
NUMBERS = {
    "loss/total": "loss {:.3g}",
    "throughput/tokens_per_second": "{:,.0f} tokens/s",
    "rollout/accuracy": "accuracy {:.3g}",
    "eval/accuracy": "held-out {:.3g}",
    "rollout/truncation_rate": "truncated {:.3g}",
    "rollout/repetition_rate": "repetitive {:.3g}",
    "rollout/response_length_mean": "length {:.3g}",
    "grad_norm": "gradient {:.3g}",
    "time/total": "{:.1f} s",
}


class Terminal:
    def __init__(self, config: Config, shown: bool, console: Console | None = None):
        self._name, self._steps, self._shown = config.run.name, config.train.steps, shown
        self._sample_every = config.monitoring.sample_every
        self._console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(10), MofNCompleteColumn())
        self._bar = Progress(
            *(*columns, TimeRemainingColumn(), TextColumn("{task.fields[phase]}")),
            console=self._console,
            auto_refresh=False,  # a refresh thread's lock would be inherited by forks
            speed_estimate_period=3600,  # seconds
            disable=not shown or not self._console.is_interactive or self._console.no_color,
        )
        self._task = self._bar.add_task(printable(self._name), total=self._steps, phase="")

    def say(self, text: str) -> None:
        if self._shown:
            self._console.print(Text(printable(text)), soft_wrap=True)

    def begin(self, step: int) -> Progress:
        """The bar of a run that has finished `step`: a context manager around its steps."""
        self._bar.reset(self._task, completed=step)
        return self._bar

    def phase(self, name: str) -> None:
        self._bar.update(self._task, phase=name, refresh=True)

    def step_done(
        self, step: int, values: Mapping[str, float | None], rollouts: Sequence[Rollout]
    ) -> None:
        if self._sample_every and step % self._sample_every == 0 and rollouts:
            self.say(sample_text(step, rollouts[0]))
        self._bar.update(self._task, completed=step)
        seconds = self._bar.tasks[0].time_remaining
        found = ((values.get(key), form) for key, form in NUMBERS.items())
        numbers = [form.format(value) for value, form in found if value is not None]
        left = [] if seconds is None else [f"{timedelta(seconds=round(seconds))} left"]
        self.say("  ".join([f"{self._name} step {step}/{self._steps}", *numbers, *left]))


def sample_text(step: int, rollout: Rollout) -> str:
    """A rollout: its problem, the beginning and the end of its response, its verdict."""
    of_verdicts = {None: "not graded", 1.0: "right", 0.0: "wrong"}
    verdict = of_verdicts.get(rollout.reward) or f"reward {rollout.reward:.4g}"
    ending = ENDED[rollout.finish_reason]
    answer = "" if rollout.prompt.answer is None else f" (gold answer {rollout.prompt.answer})"
    turns = "" if len(rollout.turns) == 1 else f"turn {len(rollout.turns)}, "
    numbers = f"{turns}{len(rollout.token_ids)} tokens"
    head = f"step {step}, {numbers}, {ending}, {verdict}{_cut(answer)}"
    return f"--- a rollout of {head}\n{_cut(rollout.problem)}\n>>> {_cut(rollout.text)}\n---"


def _cut(text: str) -> str:
    left_out = len(text) - SAMPLE_HEAD - SAMPLE_TAIL
    cut = f"{text[:SAMPLE_HEAD]} [... {left_out} characters ...] {text[-SAMPLE_TAIL:]}"
    return cut if left_out > 0 else text
