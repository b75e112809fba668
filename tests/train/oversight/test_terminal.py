"""What a run says: on terminals, into a pipe, at a resume, and with hostile text."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.train.oversight import terminal as terminal_module
from stable_opd_mcore.train.oversight.terminal import (
    Terminal,
    resume_text,
    sample_text,
    seconds_left,
)
from stable_opd_mcore.train.setup import models_text
from tests.train.runs import tiny_config

VALUES = {
    "loss/total": 1.23456,
    "rollout/accuracy": 0.5,
    "rollout/truncation_rate": None,
    "rollout/repetition_rate": 0.25,
    "rollout/response_length_mean": 812.4,
    "grad_norm": 3.0,
    "throughput/tokens_per_second": 1234.6,
    "time/total": 2.0,
}


def rollout(text="2;[2]", reward: float | None = 1.0) -> Rollout:
    prompt = Prompt("train:0", "1+1", (1,), "2")
    return Rollout(prompt, 0, (3, 4), (-0.1, -0.2), "stop", 1, text, reward)


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_count_time_left_and_phase_are_kept_at_every_width(tmp_path, width):
    long = tiny_config(tmp_path, "a-run-with-a-very-long-name", train={"steps": 800})
    lines = live_lines(long, width, 412, {**VALUES, "eval/accuracy": 0.25}, VALUES)
    assert all(cell_len(line) <= width for line in lines)
    for part in ("413/800", " left", "rollout", "loss 1.2"):
        assert part in lines[-1]
    assert "truncated" not in lines[-1]  # it has no value
    assert ("\N{BOX DRAWINGS HEAVY HORIZONTAL}" in lines[-1]) == (width >= 72)
    assert "1,235 tokens/s" in lines[-1] or width in (40, 80)
    for part in ("held-out 0.25", "gradient 3"):  # held-out: of the step before
        assert (part in lines[-1]) == (width == 200)


def live_lines(config, width, step, *steps):
    """The states of the line that keeps its place."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    with Terminal(config, True, console) as terminal:
        terminal.start(step - 1)
        for number, values in enumerate(steps, start=step):
            terminal.step_done(number, values, [])
        terminal.phase("rollout")
        terminal.say("a line above")
        shown = stream.getvalue()
    assert "a line above" in shown
    return [line for line in re.split(r"\x1b\[[\d;?]*\w|[\r\n]", shown) if "/800" in line]


def test_the_time_left_is_that_of_the_last_steps():
    assert seconds_left([10.0], 5) is None
    assert seconds_left([10.0, 12.0, 16.0], 5) == 15.0


@pytest.mark.parametrize("no_color", [False, True])
def test_a_pipe_or_no_color_gets_one_line_a_step_and_a_sample_now_and_then(
    tmp_path, monkeypatch, no_color
):
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(terminal_module, "SAMPLE_EVERY", 2)
    config = tiny_config(tmp_path, "a-run", train={"steps": 4})
    stream = io.StringIO()
    with Terminal(
        config, True, Console(file=stream, width=80, force_terminal=no_color)
    ) as terminal:
        terminal.start(1)
        terminal.phase("rollout")
        for step in (2, 3, 4):
            terminal.step_done(step, VALUES, [rollout()])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 + 2 * 4
    assert lines[0].startswith("--- a rollout of step 2, 2 tokens, stopped, right (gold answer 2)")
    begin = "a-run step 2/4  loss 1.23  1,235 tokens/s  accuracy 0.5  repetitive 0.25"
    assert lines[4].startswith(begin)
    assert lines[4].endswith("2.0 s  0:00:00 left")
    assert lines[5].startswith("a-run step 3/4")


def test_nothing_is_said_where_nothing_is_shown(tmp_path):
    stream = io.StringIO()
    config = tiny_config(tmp_path, "a-run", train={"steps": 4})
    with Terminal(config, False, Console(file=stream)) as terminal:
        terminal.say("text")
        terminal.start(0)
        terminal.step_done(1, VALUES, [rollout()])
    assert stream.getvalue() == ""


def test_a_sample_is_short_and_its_text_is_harmless(tmp_path, monkeypatch):
    long = sample_text(3, rollout("head" + "x" * 10_000 + "tail", None))
    assert "not graded" in long
    assert "head" in long
    assert "[... 9508 characters ...]" in long
    assert "tail" in long
    stream = io.StringIO()
    monkeypatch.setattr(terminal_module, "SAMPLE_EVERY", 1)
    config = tiny_config(tmp_path, "a-run", train={"steps": 4})
    hostile = "\x1b]0;title\x07\x1b[2J[bold]markup[/nothing] \ud83d \u202e"
    with Terminal(config, True, Console(file=stream, width=80)) as terminal:
        terminal.step_done(1, VALUES, [rollout(hostile)])
    assert "\x1b" not in stream.getvalue()
    assert "[bold]markup[/nothing]" in stream.getvalue()


def test_a_run_says_what_it_loads_where_it_resumes_and_where_results_lie(tmp_path):
    config = tiny_config(tmp_path, "a-run", teacher=None, train={"steps": 4})
    assert resume_text(config, 0).startswith("starting at step 0 of 4; results in ")
    assert resume_text(config, 3).startswith("resuming at step 3 of 4; results in ")
    assert str(config.run.path) in resume_text(config, 0)
    assert models_text(config) == "student (random weights)"
