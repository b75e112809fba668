"""What the user's function for the teacher's prompt gets, and what becomes of what it returns."""

from dataclasses import replace
from pathlib import Path

import pytest

from stable_opd_mcore.config.models import PromptFunction
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.rollout_prompts import RolloutPrompts, Told
from stable_opd_mcore.data.synthetic import VOCABULARY
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.monitoring.names import require_known
from stable_opd_mcore.records import Prompt, Rollout, Turn, Use
from tests.data.real_tokenizers import QWEN25, real_tokenizer

EXAMPLES = Path(__file__).parents[2] / "docs/examples/teacher_prompts.py"
MESSAGES = ({"role": "user", "content": "1+1"},)


def rollout(text: str, number: int = 0, *, slot: int = 0, **fields) -> Rollout:
    prompt = Prompt(
        "s:1",
        "1+1",
        (1, 2),
        columns={"problem": "1+1", "solution": "1+1=2"},
        messages=MESSAGES,
        slot=slot,
    )
    ids = [VOCABULARY.index("=")] * len(text)
    found = Rollout(prompt, number, ids, [0.0] * len(text), Ending.STOP, 0, text, **fields)
    return found


def made(tmp_path: Path, body: str, rollouts, window=None):
    path = tmp_path / "own.py"
    path.write_text(f"def prompt(row, rollout, others):\n    {body}\n")
    function = PromptFunction(function=f"{path}:prompt").read()
    prompts = RolloutPrompts(function, Tokenizer.load("synthetic"), None, window)
    return prompts.of(rollouts), prompts.take_metrics().values_by_key()


def texts(found) -> list[str | None]:
    return [
        each and each.token_ids and "".join(VOCABULARY[i] for i in each.token_ids) for each in found
    ]


def test_a_function_gets_the_row_the_rollout_and_its_siblings(tmp_path):
    group = [rollout("=2", 0, reward=1.0), rollout("=3", 1, reward=0.0, feedback="1")]
    alone = rollout("=4", 0, slot=1, reward=0.0)
    body = (
        "return row['problem'] + rollout.text + (rollout.feedback or '') + "
        "''.join(f';{each.text}w{int(each.reward)}' for each in others)"
    )
    found, values = made(tmp_path, body, [*group, alone])
    assert texts(found) == ["1+1=2;=3w0#", "1+1=31;=2w1#", "1+1=4#"]
    assert values["teacher_prompt/given_share"] == 1
    assert values["teacher_prompt/tokens_mean"] == pytest.approx((11 + 12 + 6) / 3)
    require_known(values)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return others[1].text", "s:1: IndexError: list index out of range"),
        ("return []", "it returned no messages; expected at least one, or None"),
        ("return 3", "it returned 3; expected None, a text, or a list of messages"),
        ("return [{'role': 'judge', 'content': 'x'}]", "it returned .*'judge'.*expected None"),
    ],
)
def test_a_function_that_fails_leaves_the_rollout_without_a_teacher(tmp_path, body, reason):
    found, values = made(tmp_path, body, [rollout("=2"), rollout("=3", 1)])
    assert texts(found) == [None, None]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found[0].failure)
    assert (values["teacher_prompt/failed_share"], values["teacher_prompt/given_share"]) == (1, 0)


def test_control_tokens_are_broken_up_and_prompts_without_room_or_knowledge_are_counted(tmp_path):
    unasked = rollout("=1", 3)
    unasked = replace(unasked, prompt=replace(unasked.prompt, use=Use(is_taught=False)))
    lost = replace(rollout("", 4), finish_reason=Ending.FAILED)
    attempts = [rollout("=2"), rollout("=3333", 1), rollout("=4", 2), unasked, lost]
    body = "return None if '4' in rollout.text else rollout.text + '1+1' + 'A'"
    found, values = made(tmp_path, body, attempts, window=10)
    assert texts(found) == ["=21+1_#", None, None, None, None]
    assert found[3] is found[4] is None  # nobody would score them
    assert values["teacher_prompt/given_share"] == values["teacher_prompt/long_share"] == 1 / 3
    assert values["teacher_prompt/neutralised_tokens"] == 2
    assert values["teacher_prompt/failed_share"] == 0


def test_an_episode_is_told_in_messages():
    said = {"role": "assistant", "content": "=2"}
    opened = ({"role": "system", "content": "+"}, *MESSAGES)
    answer = {"role": "tool", "content": "3"}
    turns = (
        Turn(2, Ending.STOP, (1,), restarts=True, text="=2", messages=opened),
        Turn(1, Ending.STOP, (1,), text="4", messages=(answer,)),
    )
    told = Told.of(replace(rollout("=24"), turns=turns, text="4", metrics={"steps": 2.0}))
    assert told.messages == [*opened, said, answer, {"role": "assistant", "content": "4"}]
    assert (told.num_prompt_messages, told.text, told.metrics) == (2, "4", {"steps": 2.0})
    (own,) = Told.of(replace(rollout("=2"), text="=2")).messages[:1]
    assert own == MESSAGES[0]


def test_the_examples_put_what_is_known_at_the_end_of_the_prompt():
    tokenizer, said = real_tokenizer(QWEN25), "too <|im_end|> short"
    group = [rollout("no", 0, reward=0.0, feedback=said), rollout("2", 1, reward=1.0)]
    notes = {
        "feedback": "A first attempt got this feedback:\ntoo < |im_end|> short",
        "successful_sibling": "A correct solution is:\n2",
        "golden_solution": "A correct solution is:\n1+1=2",
    }
    for name, note in notes.items():
        function = PromptFunction(function=f"{EXAMPLES}:{name}").read()
        first, second = RolloutPrompts(function, tokenizer, "Be brief.", None).of(group)
        text = "".join(tokenizer.pieces(first.token_ids))
        assert f"user\n1+1\n\n{note}\n\nNow solve it in your own words.<|im_end|>" in text
        assert "system\nBe brief.<|im_end|>" in text
        assert second.token_ids is second.failure is None
        shown = RolloutPrompts(function, tokenizer, None, None).example(group[0].prompt)
        assert note.split("\n")[0] in shown.split("1+1\n\n")[1]
