"""metrics.jsonl holds every step once, also after a kill, and no NaN."""

import json
import logging
import math

import pytest

from stable_opd_mcore.metrics import Metrics, Sum
from stable_opd_mcore.monitoring.metric_sinks import JsonlSink, MetricSinks, read_metrics
from tests.commands.report.make_run import config


def write_steps(path, steps, first_step=0, value=0.5):
    sink = JsonlSink(path, first_step)
    for step in steps:
        sink.write(step, {"loss/total": value, "grad_norm": 1.0})
    sink.close()


def test_a_row_is_step_then_sorted_keys_and_on_disk_before_the_next_step(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"loss/total": 0.5, "grad_norm": 0.1})
    assert path.read_text() == '{"step": 1, "grad_norm": 0.1, "loss/total": 0.5}\n'
    with pytest.raises(ValueError, match="step 1 after step 1"):
        sink.write(1, {"grad_norm": 1.0})
    sink.close()
    again = JsonlSink(path, first_step=2)
    with pytest.raises(ValueError, match="step 1 after step 1"):
        again.write(1, {"grad_norm": 1.0})
    again.close()


def test_resuming_rewrites_the_steps_after_the_checkpoint_only(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, range(8), value=1 / 3)
    write_steps(path, range(5, 8), first_step=5, value=2.0)
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["loss/total"] for row in rows] == [1 / 3] * 5 + [2.0] * 3
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\x00\x00\n\n"])
def test_a_last_line_cut_by_a_kill_is_not_read_and_dropped_on_resume(tmp_path, end):
    path = tmp_path / "m.jsonl"
    write_steps(path, range(3))
    path.write_bytes(path.read_bytes() + b'{"step": 3, "loss/to' + end)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
    write_steps(path, [3], first_step=3)
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]


def test_values_that_are_not_finite_are_null_and_named(tmp_path, caplog):
    sink = JsonlSink(tmp_path / "m.jsonl")
    with caplog.at_level(logging.WARNING):
        sink.write(4, {"grad_norm": math.nan, "loss/kl": -math.inf, "eval/accuracy": None})
    sink.close()
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert row == {
        "step": 4,
        "eval/accuracy": None,
        "grad_norm": None,
        "loss/kl": None,
        "non_finite": {"grad_norm": "nan", "loss/kl": "-inf"},
    }
    assert "step 4: grad_norm is nan, loss/kl is -inf" in caplog.text


MALFORMED = [
    ('{"step": 0}\n{"loss/total": 1}\n', "line 2: column step is missing"),
    ('{"step": 0}\n[]\n', "line 2: .*valid dictionary"),
    ('{"step": 0, "loss/total": "low"}\n', "line 1: column loss/total is 'low': .*number"),
    ('{"step": 0, "loss/total": 1e999}\n', "line 1: column loss/total is inf: .*finite number"),
    ('{"step": -1}\n', "line 1: column step is -1"),
    ('{"event": 5, "after_step": 1}\n', "line 1: column event is 5"),
    ('{"event": "guard"}\n', "line 1: column after_step is missing"),
    ('{"step": 1}\n{"step": 1}\n', "line 2: step 1 after step 1; remove the line"),
    ('{"step": 0}\n{"step"\n{"step": 2}\n', "line 2: not JSON .*; remove the line"),
    ("", "no rows"),
]  # text, message


def test_malformed_metrics_are_named(tmp_path):
    for text, message in MALFORMED:
        (tmp_path / "m.jsonl").write_text(text)
        with pytest.raises(ValueError, match=rf"m.jsonl.*{message}"):
            read_metrics(tmp_path / "m.jsonl")
        if "remove the line" in message:
            lines = text.splitlines(keepends=True)
            (tmp_path / "m.jsonl").write_text("".join([lines[0], *lines[2:]]))
            assert read_metrics(tmp_path / "m.jsonl")


def test_an_unlisted_metric_is_refused_before_anything_is_written(tmp_path):
    with (
        MetricSinks(tmp_path, config(monitoring={"tensorboard": False}), first_step=0) as sinks,
        pytest.raises(ValueError, match="unknown metrics loss/totla"),
    ):
        sinks.write(0, Metrics({"loss/totla": Sum(1.0)}))
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "tensorboard").exists()


def test_resumed_run_drops_the_guards_events_that_it_writes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in (1, 2, 3, 4):
        sink.write(step, {"loss/total": 1.0})
        sink.write_event("guard", step, {"action": "raised"})
        sink.write_event("settings_changed", step, {"changes": {}})
    sink.close()
    JsonlSink(path, first_step=3).close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows if "step" in row] == [1, 2]
    kept = [(row["event"], row["after_step"]) for row in rows if "event" in row]
    assert [step for event, step in kept if event == "guard"] == [1, 2]
    assert [step for event, step in kept if event == "settings_changed"] == [1, 2, 3, 4]
