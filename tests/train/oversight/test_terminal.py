"""What a run says: on terminals, into a pipe, and with hostile text."""

import io
import itertools

import pytest
from rich.console import Console

from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.train.oversight.terminal import Terminal, sample_text
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


def test_a_terminal_has_a_bar_with_count_time_left_and_phase_below_the_steps(tmp_path):
    config = tiny_config(tmp_path, "a-run", train={"steps": 800})
    stream, seconds = io.StringIO(), itertools.count(step=10.0)
    console = Console(file=stream, width=100, force_terminal=True, color_system=None)
    console.get_time = lambda: next(seconds)
    terminal = Terminal(config, True, console)
    with terminal.begin(411):
        for step in (412, 413):
            terminal.step_done(step, VALUES, [])
        terminal.phase("rollout")
        terminal.say("a line above")
    *above, bar, _ = stream.getvalue().splitlines()
    assert "413/800" in bar
    assert "rollout" in bar
    assert any("a line above" in line for line in above)
    (step,) = (line for line in above if "a-run step 413/800  loss 1.23" in line)
    assert " left" in step


@pytest.mark.parametrize("no_color", [False, True])
def test_a_pipe_or_no_color_gets_one_line_a_step_and_a_sample_now_and_then(
    tmp_path, monkeypatch, no_color
):
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    monitoring = {"tensorboard": False, "sample_every": 2}
    config = tiny_config(tmp_path, "a-run", train={"steps": 4}, monitoring=monitoring)
    stream = io.StringIO()
    terminal = Terminal(config, True, Console(file=stream, width=80, force_terminal=no_color))
    with terminal.begin(1):
        terminal.phase("rollout")
        for step in (2, 3, 4):
            terminal.step_done(step, VALUES, [rollout()])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3 + 2 * 4
    assert lines[0].startswith("--- a rollout of step 2, 2 tokens, stopped, right (gold answer 2)")
    begin = "a-run step 2/4  loss 1.23  1,235 tokens/s  accuracy 0.5  repetitive 0.25"
    assert lines[4].startswith(begin)  # truncation has no value
    assert lines[5].startswith("a-run step 3/4")
    assert lines[-1].endswith("2.0 s  0:00:00 left")


def test_no_line_where_nothing_is_shown_and_no_rollout_with_sample_every_0(tmp_path):
    stream = io.StringIO()
    for sample_every, shown in ((1, False), (0, True)):
        monitoring = {"tensorboard": False, "sample_every": sample_every}
        config = tiny_config(tmp_path, "a-run", train={"steps": 4}, monitoring=monitoring)
        terminal = Terminal(config, shown, Console(file=stream))
        with terminal.begin(0):
            if not shown:
                terminal.say("text")
            terminal.step_done(1, VALUES, [rollout()])
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().startswith("a-run step 1/4")


def test_a_sample_is_short_and_its_text_is_harmless(tmp_path, monkeypatch):
    long = sample_text(3, rollout("head" + "x" * 10_000 + "tail", None))
    assert "not graded" in long
    assert "stopped, reward -2.5 (gold" in sample_text(3, rollout(reward=-2.5))
    assert "head" in long
    assert "[... 9508 characters ...]" in long
    assert "tail" in long
    stream = io.StringIO()
    monitoring = {"tensorboard": False, "sample_every": 1}
    config = tiny_config(tmp_path, "a-run", train={"steps": 4}, monitoring=monitoring)
    hostile = "\x1b]0;title\x07\x1b[2J[bold]markup[/nothing] \ud83d \u202e"
    terminal = Terminal(config, True, Console(file=stream, width=80))
    with terminal.begin(0):
        terminal.step_done(1, VALUES, [rollout(hostile)])
    assert "\x1b" not in stream.getvalue()
    assert "[bold]markup[/nothing]" in stream.getvalue()
