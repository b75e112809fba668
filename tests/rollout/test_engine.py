"""What every engine refuses."""

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.engine import check_prompts


def check(ids: tuple[int, ...], **sampling) -> None:
    """With a vocabulary of 10 and a window of 8."""
    prompts = [Prompt("good", "", (1, 2)), Prompt("set:3", "", ids)]
    options = {"max_new_tokens": 5, "stop_token_ids": (0, 9)} | sampling
    check_prompts(prompts, Sampling(**options), vocab_size=10, window=8)


def test_the_largest_prompt_that_fits_is_accepted():
    check((0, 9, 5))
    check((0, 0), max_new_tokens=6, stop_token_ids=())


@pytest.mark.parametrize(
    ("ids", "sampling", "message"),
    [
        ((), {}, "prompt set:3: no tokens; drop the prompt"),
        ((1, 10), {}, "set:3: token id 10 is outside the model's vocabulary of 10; the tokenizer"),
        ((-1, 10), {}, "set:3: token id -1 is outside"),
        (
            (1, 2, 3, 4),
            {},
            r"set:3: 4 prompt tokens \+ max_new_tokens 5 = 9 exceed the model's window of 8; lower "
            r"sampling.max_new_tokens or drop the prompt \(data.overlong=drop\)",
        ),
        ((1,), {"max_new_tokens": 7}, "good: 2 prompt tokens .* 7 = 9 exceed"),
        ((1,), {"stop_token_ids": (9, 10, -1)}, r"stop token ids \[10, -1\] are outside .* of 10"),
    ],
)
def test_impossible_prompts_are_refused(ids, sampling, message):
    with pytest.raises(UserError, match=message):
        check(ids, **sampling)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1 is negative; set 0 for greedy"),
        ({"temperature": 1e-320}, "too small to divide logits by: set at least 0.001, or 0 for"),
        ({"temperature": 5e-4}, "too small to divide logits by: set at least 0.001, or 0 for"),
        ({"top_p": 0.0}, r"top_p 0.0 is outside \(0, 1\]"),
        ({"top_p": 1.01}, r"top_p 1.01 is outside \(0, 1\]"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ({"num_samples": 0}, "num_samples 0 must be at least 1"),
    ],
)
def test_impossible_sampling_is_refused(wrong, message):
    with pytest.raises(UserError, match=message):
        Sampling(**wrong)
    for value in (1, *(0.0, 1e-3) * ("temperature" in wrong)):
        Sampling(**dict.fromkeys(wrong, value))
