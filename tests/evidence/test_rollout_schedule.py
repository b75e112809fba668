"""The clock of events against closed forms, and what a schedule gains where lengths have a tail."""

import json
from dataclasses import replace
from functools import partial

import pytest

from docs.evidence.programs import rollout_schedule as bench
from docs.evidence.programs.rollout_schedule import (
    FITTED,
    PROMPT_TOKENS,
    Hardware,
    Schedule,
    compare,
)

SMALL = Hardware(servers=2, slots=32)


def found(lengths, schedules, **settings):
    return compare(lengths, schedules, responses=32, steps=20, hardware=SMALL, **settings)


def test_equal_lengths_take_what_the_roofline_says():
    length, each = 1000, 16
    on_policy, ahead = found(lambda _: length, [Schedule(1)], balance=0.5)
    prefill = SMALL.prefill_seconds * PROMPT_TOKENS * each
    context = PROMPT_TOKENS * length + length**2 / 2
    sampled = (
        prefill
        + length * (SMALL.step_seconds + each * SMALL.response_seconds)
        + SMALL.context_seconds * each * context
    )
    batches = [[length] * 32]
    trained = 0.5 * bench.balanced(batches, SMALL) * 32 * (length + PROMPT_TOKENS)
    publish = SMALL.publish_seconds
    assert on_policy.step_seconds == pytest.approx(sampled + trained + publish)
    assert ahead.step_seconds == pytest.approx(max(sampled, trained) + publish)
    assert (on_policy.mean_staleness, ahead.mean_staleness) == (0, 1)
    step = sampled + trained + publish  # one role waits while the other works, both for no publish
    assert on_policy.trainer_waited == pytest.approx((sampled + publish) / step)
    assert on_policy.servers_waited == pytest.approx(trained / step)


def test_responses_that_outlive_updates_gain_where_lengths_have_a_tail():
    schedules = [Schedule(1), Schedule(1, True), Schedule(4), Schedule(4, True)]
    _, one, one_partial, four, four_partial = found(FITTED["base"], schedules)
    assert one.speedup < one_partial.speedup < four_partial.speedup
    assert one_partial.speedup > 1.5
    assert four.speedup > 1.8
    assert four_partial.continued > one_partial.continued > one.continued == 0
    slow = found(FITTED["base"], [Schedule(4, True)], balance=4)[1]
    assert slow.trainer_waited < 0.1


def test_a_new_prefill_costs_time():
    costly = replace(SMALL, prefill_seconds=1e-3)
    cheap, dear = (
        bench.simulate(Schedule(2, True), [[2000] * 32] * 12, 1e-4, hardware).step_seconds
        for hardware in (SMALL, costly)
    )
    assert dear > 1.5 * cheap


def test_a_fitted_log_normal_has_the_mean_and_the_truncated_share():
    assert bench.fit(6503, 0.133) == pytest.approx(bench.LONG, abs=0.01)
    assert bench.fit(1564, 0.0234) == pytest.approx(bench.SHORT, abs=0.01)


def test_files_of_answers_and_traces_give_lengths(tmp_path, monkeypatch, capsys):
    answers, traces, out = (tmp_path / name for name in ("a.jsonl", "t.csv", "out.json"))
    answers.write_text(json.dumps({"response": "x" * 292}) + "\n")
    traces.write_text("response_length_mean,truncation_rate\n800,0.001\n")
    files = ["--generations", str(answers), "--traces", str(traces), "--json", str(out)]
    monkeypatch.setattr(bench, "FITTED", {})
    monkeypatch.setattr("sys.argv", ["rollout_schedule", *files])
    monkeypatch.setattr(bench, "SCHEDULES", (Schedule(1),))
    monkeypatch.setattr(bench, "compare", partial(compare, steps=8))
    bench.main()
    results = json.loads(out.read_text())
    assert [r["schedule"] for r in results["answers"]] == ["on-policy", "K=1"]
    tokens = [results[name][0] for name in ("answers", "traces")]
    assert tokens[0]["tokens_per_second"] * tokens[0]["step_seconds"] == pytest.approx(512 * 100)
    assert "traces" in capsys.readouterr().out
