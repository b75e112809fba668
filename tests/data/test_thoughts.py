"""What of a response is thought, and what is answer: think marks, channels, opened prompts."""

import pytest

from stable_opd_mcore.data.thoughts import (
    SplitResponse,
    channel_message,
    golden_response,
    opens_thinking,
    split_thought,
)

THINKS = "<|channel|>analysis<|message|>"
SAYS = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
NAMED = "<|channel|>commentary to=functions.f.g <|constrain|>json<|message|>"
INSIDE = "<|channel|>analysis to=functions.f code<|message|>"
CALLS = " to=functions.add<|channel|>commentary json<|message|>"


RESPONSES = [
    ("It is 2.", False, "", "It is 2."),
    ("", False, "", ""),
    ("<think>\nHm.\n</think>\n\nIt is 2.", False, "Hm.", "\n\nIt is 2."),
    ("Hm.\n</think>\n\nIt is 2.", True, "Hm.", "\n\nIt is 2."),
    ("a</think>b</think>c", False, "a</think>b", "c"),
    ("\n<think>Hm.", False, "Hm.", None),
    ("Hm. It is 2.", True, "Hm. It is 2.", None),
    ("[THINK]Hm.[/THINK]It is 2.", False, "Hm.", "It is 2."),
    ("[THINK]Hm.", False, "Hm.", None),
    ("I <think> so.", False, "", "I <think> so."),
    (f"{THINKS}Hm.{NEXT}{SAYS}It is 2.", False, "Hm.", "It is 2."),
    (f"{SAYS}It is 2.", False, "", "It is 2."),
    (f"{SAYS}It is 2.<|return|>", False, "", "It is 2."),
    (f"{THINKS}Hm.", False, "Hm.", None),
    (f"{THINKS}Hm.{NEXT}<|channel|>fin", False, "Hm.", None),
    (f"{THINKS}a{NEXT}{THINKS}b{NEXT}{SAYS}2", False, "a\nb", "2"),
    (f"Hm.{NEXT}{SAYS}It is 2.", True, "Hm.", "It is 2."),
    (f"{THINKS}Hm.{NEXT}<|channel|> final<|message|>2", False, "Hm.", "2"),
    (f"{THINKS}Hm.{NEXT}{INSIDE}{{}}", False, "Hm.", f"<|start|>assistant{INSIDE}{{}}"),
    (f"{SAYS}2{NEXT}{THINKS}or 3", False, "or 3", "2"),
    (
        f'{THINKS}Hm.{NEXT}{CALLS}{{"a": 1}}',
        False,
        "Hm.",
        f'<|start|>assistant{CALLS}{{"a": 1}}',
    ),
    (
        "<|channel|>commentary<|message|>I add.",
        False,
        "",
        "<|channel|>commentary<|message|>I add.",
    ),
]  # response, in_thought, thought, answer


def test_a_response_is_a_thought_and_an_answer():
    for response, in_thought, thought, answer in RESPONSES:
        said = split_thought(response, in_thought)
        assert (said.thought, said.answer) == (thought, answer)
        assert response[said.start :].startswith(answer or "")
        assert (said.start == len(response)) or answer is not None


def test_parts_of_channels_are_a_message():
    """What a chat template takes; a call that is no JSON stays text."""
    assert channel_message("It is 2.") is None
    for response, content, calls in (
        (f"{THINKS}Hm.{NEXT}{SAYS}It is 2.", "It is 2.", None),
        (f"{THINKS}Hm.", "", None),
        (f'{THINKS}Hm.{NEXT}{CALLS}{{"a": 1}}', "", {"name": "add", "arguments": {"a": 1}}),
        (
            THINKS + "Hm." + NEXT + NAMED + "{}",
            "",
            {"name": "f.g", "arguments": {}},
        ),
        (f"{THINKS}Hm.{NEXT}{INSIDE}{{}}", "", {"name": "f", "arguments": {}}),
        (f"{THINKS}Hm.{NEXT}{CALLS}a = 1", "a = 1", None),
    ):
        message = {"role": "assistant", "content": content, "reasoning_content": "Hm."}
        made = {"tool_calls": [{"function": calls}]} if calls else {}
        assert channel_message(response) == message | made


@pytest.mark.parametrize(
    ("prompt", "opens", "solution", "response"),
    [
        ("1+1?", False, "It is 2.", "It is 2."),
        ("1+1?<think>\n", True, "It is 2.", "\n</think>\n\nIt is 2."),
        ("1+1?<think>\n", True, "<think>\nHm.\n</think>\n\n2", "Hm.\n</think>\n\n2"),
        ("1+1?[THINK]", True, "[THINK]Hm.[/THINK]2", "Hm.[/THINK]2"),
        (f"<|start|>assistant{SAYS}", False, "It is 2.", "It is 2."),
    ],
)
def test_a_prompt_may_open_the_thought(prompt, opens, solution, response):
    assert opens_thinking(prompt) is opens
    assert golden_response(solution, prompt) == response
    assert opens_thinking(f"<|start|>assistant{THINKS}")


def test_a_response_cut_anywhere_never_has_its_thought_as_answer():
    whole = f"{THINKS}maybe 7{NEXT}{SAYS}It is 5."
    for text in (whole, "<think>maybe 7</think>It is 5.", "[THINK]maybe 7[/THINK]It is 5."):
        answers = [split_thought(text[:end]).answer for end in range(9, len(text) + 1)]
        assert not any("7" in (answer or "") for answer in answers)
        assert answers[-1] == "It is 5."
    assert split_thought("") == SplitResponse("", "", 0)
