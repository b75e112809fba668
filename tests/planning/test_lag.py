"""The closed form against the same schedules on a clock of events, with and without a tail."""

import random
from statistics import fmean

import pytest

from benchmarks.rollout_schedule import (
    FITTED,
    PROMPT_TOKENS,
    SCHEDULES,
    Hardware,
    Schedule,
    balanced,
    simulate,
)
from stable_opd_mcore.planning.lag import Drawing, publish_every, waiting_seconds

HARDWARE = Hardware(servers=2)


@pytest.mark.parametrize(("name", "largest"), [("long", 0.12), ("equal", 0.20)])
@pytest.mark.parametrize("balance", [0.5, 2])
def test_a_step_takes_what_the_clock_of_events_says(name, largest, balance):
    noise, responses = random.Random(0), 128
    batches = [[FITTED[name](noise) for _ in range(responses)] for _ in range(20)]
    lengths = [length for batch in batches for length in batch]
    tokens, each = fmean(lengths) * responses / 2, responses / 2
    context = PROMPT_TOKENS + fmean(x * x for x in lengths) / fmean(lengths) / 2
    of_token = HARDWARE.response_seconds + HARDWARE.context_seconds * context
    draw = Drawing(
        step=HARDWARE.step_seconds,
        longest=fmean(max(batch) for batch in batches),
        tokens=tokens,
        work=tokens * of_token + each * PROMPT_TOKENS * HARDWARE.prefill_seconds,
        slots=HARDWARE.slots,
        again=context * HARDWARE.prefill_seconds,
    )
    token_seconds = balance * balanced(batches, HARDWARE)
    busy, publish = token_seconds * 2 * (tokens + PROMPT_TOKENS * each), HARDWARE.publish_seconds
    for schedule in (Schedule(0), *SCHEDULES):
        how = schedule.max_staleness, schedule.partial
        assert schedule.publish_every == publish_every(*how)
        seconds = waiting_seconds(draw, busy, publish, *how) + busy + publish / publish_every(*how)
        measured = simulate(schedule, batches, token_seconds, HARDWARE).step_seconds
        assert seconds == pytest.approx(measured, rel=largest), schedule


def test_a_trainer_that_is_slow_enough_waits_for_no_response():
    draw = Drawing(step=0.01, longest=1000, tokens=10_000, work=1.0, slots=100, again=0.01)
    assert waiting_seconds(draw, 30.0, 1.0, 0, False) == pytest.approx(11)
    for ahead, partial in ((1, False), (1, True), (4, False), (4, True)):
        assert waiting_seconds(draw, 30.0, 1.0, ahead, partial) == pytest.approx(0, abs=1e-6)
