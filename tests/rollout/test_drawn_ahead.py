"""What is held for a step, and whom it serves."""

from dataclasses import replace

import numpy as np

from stable_opd_mcore.records import Prompt, Rollout, Sampling, Segment
from stable_opd_mcore.rollout.drawn_ahead import DrawnAhead, with_tokens

PROMPT = Prompt("a", "", (1, 2))
SAMPLING = Sampling(max_new_tokens=3, stop_token_ids=(9,))


def rollout(num_tokens: int, reason: str = "abort", version: int = 4) -> Rollout:
    return Rollout(PROMPT, 0, (5,) * num_tokens, (-1.0,) * num_tokens, reason, version)


def test_only_rollouts_of_the_settings_and_the_bound_serve():
    for held, serves in (
        (rollout(2), True),
        (rollout(3, "length"), True),
        (rollout(3), False),  # of a larger budget
        (rollout(4, "length"), False),
        (rollout(2, version=3), False),  # three versions old at step 6
        (replace(rollout(2), prompt=Prompt("a", "", (1, 3))), False),
    ):
        ahead = DrawnAhead(max_staleness=2)
        ahead.restore({7: [held]})
        (begun,) = ahead.begun([PROMPT], SAMPLING, 7, weight_version=6)
        assert (begun == held) == serves
        assert serves or (len(begun.token_ids), begun.finish_reason) == (0, "abort")
        (fresh,) = ahead.begun([PROMPT], SAMPLING, 8, weight_version=6)
        assert len(fresh.token_ids) == 0


def test_tokens_of_one_version_are_one_segment():
    drawn = rollout(0, version=1)
    for token, version in ((5, 2), (6, 2), (7, 3)):
        drawn = with_tokens(drawn, np.array([token]), np.float32([-1]), SAMPLING, version)
    assert drawn.token_ids.tolist() == [5, 6, 7]
    assert drawn.segments == (Segment(2, 2), Segment(1, 3))
    assert (drawn.weight_version, drawn.finish_reason) == (2, "length")
    stopped = with_tokens(rollout(1), np.array([9, 5]), np.float32([-2, -3]), SAMPLING, 4)
    assert stopped.token_ids.tolist() == [5, 9]
    assert stopped.rollout_logprobs.tolist() == [-1, -2]
    assert (stopped.segments, stopped.finish_reason) == ((Segment(2, 4),), "stop")


def test_of_a_checkpoint_with_prompts_of_all_ranks_only_own_ones_are_kept():
    ahead, other = DrawnAhead(max_staleness=2), replace(PROMPT, prompt_id="b")
    ahead.restore({7: [rollout(2, "stop"), replace(rollout(2, "stop"), prompt=other)]})
    ahead.hand_out([rollout(2, "stop")], SAMPLING, 7)
    assert ahead.rollouts() == {7: [rollout(2, "stop")]}
