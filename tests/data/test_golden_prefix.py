"""Which golden turns begin a rollout, and what the student then reads."""

from dataclasses import replace

import pytest

from stable_opd_mcore.config.prefix_settings import PrefixConfig
from stable_opd_mcore.data.golden_prefix import with_prefix
from stable_opd_mcore.records import Prompt, Use

SAID = {"role": "assistant", "content": "a"}
ASKED = {"role": "user", "content": "q"}
# Three golden turns of two tokens; the student reads one token after the first, two after the next.
PROMPT = Prompt(
    "s:1",
    "q",
    (1, 2),
    golden_token_ids=(3, 4, 10, 5, 6, 11, 12, 7, 8),
    golden_turn_tokens=(2, 1, 2, 2, 2),
    teacher_token_ids=(9,),
    messages=(ASKED,),
    golden_messages=(SAID, ASKED, SAID, ASKED, ASKED, SAID),
)


def begun(slot=0, step=0, room=99, seed=0, prompt=PROMPT, **settings) -> Prompt:
    config = PrefixConfig(by="golden", **settings)
    return with_prefix(replace(prompt, slot=slot), config, step=step, seed=seed, room=room)


def test_golden_turns_and_what_follows_them_end_the_prompt():
    one, two = (begun(first=number, last=number) for number in (1, 2))
    assert (one.token_ids, one.teacher_token_ids) == ((1, 2, 3, 4, 10), (9, 3, 4, 10))
    assert two.token_ids == (1, 2, 3, 4, 10, 5, 6, 11, 12)
    assert one.messages == [ASKED, SAID, ASKED]
    assert two.messages == [ASKED, SAID, ASKED, SAID, ASKED, ASKED]
    assert (one.num_played, two.num_played) == (1, 2)
    assert begun(first=2, last=2, room=6) == replace(one, slot=0)  # two turns have no room
    assert begun(first=9, last=9).token_ids == two.token_ids  # the student has at least one turn
    played = begun(first=2, prompt=replace(PROMPT, environment=""))
    assert (played.token_ids, played.num_played) == (PROMPT.token_ids, 2)  # said to it later


def test_the_number_of_turns_is_random_by_slot_and_falls_to_zero():
    numbers = [begun(slot).num_played for slot in range(300)]
    assert [numbers.count(number) / 100 for number in range(3)] == pytest.approx([1] * 3, abs=0.25)
    assert numbers == [begun(slot).num_played for slot in range(300)]  # as after a resume
    assert numbers != [begun(slot, seed=1).num_played for slot in range(300)]
    shared = [begun(slot, first=1, share=0.25).num_played > 0 for slot in range(300)]
    assert sum(shared) / 300 == pytest.approx(0.25, abs=0.08)
    falling = PrefixConfig(by="golden", first=2, decay_steps=4)
    assert [falling.range_at(step, 8) for step in (0, 1, 2, 3, 4, 99)] == [
        (2, 8),
        (1, 6),
        (1, 4),
        (0, 2),
        (0, 0),
        (0, 0),
    ]
    whole = [PROMPT, replace(PROMPT, golden_turn_tokens=(9,)), replace(PROMPT, use=Use(0, False))]
    assert [begun(first=1, prompt=each).num_played > 0 for each in whole] == [True, False, False]
