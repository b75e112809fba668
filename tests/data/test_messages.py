"""Conversations of a source: what is the prompt, what the golden solution, and hostile rows."""

import json
import re

import pytest

from stable_opd_mcore.config.data import ColumnsConfig, DataConfig, SourceConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import DataError
from tests.real_data import real_data

SYSTEM, ASK = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}
TWO, MORE = {"role": "assistant", "content": "It is 2."}, {"role": "user", "content": "And 2+2?"}
FOUR = {"role": "assistant", "content": "It is 4."}


def rows_of(path, *conversations, answer=None, **columns):
    lines = [json.dumps({"messages": each, "solution": "S", "gold": "4"}) for each in conversations]
    path.write_text("\n".join(lines))
    columns = ColumnsConfig(messages="messages", answer=answer, **columns)
    return load_rows(SourceConfig(path=str(path), columns=columns))


def test_the_last_assistant_turn_is_the_golden_solution(tmp_path):
    conversations = [SYSTEM, ASK, TWO, MORE, FOUR], [ASK, TWO, MORE], [ASK]
    rows = rows_of(tmp_path / "m.jsonl", *conversations, answer="gold")
    assert [list(row.messages) for row in rows] == [
        [SYSTEM, ASK, TWO, MORE],
        [ASK, TWO, MORE],
        [ASK],
    ]
    assert [row.solution for row in rows] == ["It is 4.", "S", "S"]
    assert [row.problem for row in rows] == ["1+1?\n\nIt is 2.\n\nAnd 2+2?"] * 2 + ["1+1?"]
    assert {row.answer for row in rows} == {"4"}
    (row,) = rows_of(tmp_path / "m.jsonl", [ASK], solution=None)
    assert row.solution is None


def test_a_conversation_is_rendered_with_its_own_system_message_else_the_configured_one(tmp_path):
    tokenizer = Tokenizer.load(str(real_data("tokenizers/Qwen2.5-Math-1.5B")))
    rows = rows_of(tmp_path / "m.jsonl", [SYSTEM, ASK, TWO, MORE, FOUR], [ASK, FOUR])
    config = DataConfig(train=SourceConfig(path="x"), system_prompt="Count.")
    prompts = PromptSet(rows, tokenizer, config, window=99, max_new_tokens=9)
    first, second = (tokenizer.decode(prompt.token_ids) for prompt in prompts.select([0, 1]))
    assert first == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\nIt is 2.<|im_end|>\n<|im_start|>user\nAnd 2+2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert second == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(prompts[0].golden_token_ids) == "It is 4."


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "holds NoneType None; expected a list of messages"),
        ("1+1?", "holds str '1+1?'; expected a list of messages"),
        ([], "holds list []; expected a list"),
        (["1+1?"], "message 0 is '1+1?'; write {role"),
        ([[ASK]], "message 0 is [{'role'"),
        ([{"role": "tool", "content": "x"}], "message 0: role 'tool'; write user or assistant"),
        ([{"content": "x"}], "message 0: role None"),
        ([{"role": ["user"], "content": "x"}], "message 0: role ['user']"),
        ([ASK, SYSTEM], "message 1: role 'system'; write user or assistant, or system in the"),
        ([{"role": "user"}], "message 0: column 'content' (message) is empty"),
        ([{"role": "user", "content": " "}], "column 'content' (message) is empty"),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "message 0: content holds list, not text; write it as one",
        ),
        ([{"role": "user", "content": {"a": 1}}], "message 0: content holds dict, not text"),
        ([{"role": "user", "content": True}], "message 0: content holds bool, not text"),
        ([{"from": "human", "value": "1+1?"}], "ShareGPT's form, with from and value; rename"),
        ([{"role": "user", "content": "\ud800"}], "has a lone surrogate"),
        ([ASK, {**TWO, "tool_calls": [{"id": "1"}]}], "message 1 has tool_calls; only role and"),
        ([TWO], "no user turn to answer"),
        ([SYSTEM], "no user turn to answer"),
        ([ASK, TWO, FOUR], "no user turn to answer"),
    ],
)
def test_hostile_conversations_are_refused_with_file_row_and_key(tmp_path, messages, message):
    where = re.escape(f"{tmp_path}/m.jsonl:2: column 'messages' (messages)")
    with pytest.raises(DataError, match=f"^{where}.*{re.escape(message)}"):
        rows_of(tmp_path / "m.jsonl", [ASK, {**TWO, "tool_calls": None}], messages)


def test_what_the_tokenizer_cannot_take_is_refused_with_the_row(tmp_path):
    config = DataConfig(train=SourceConfig(path="x"))
    tokenizer = Tokenizer.load(str(real_data("tokenizers/Qwen2.5-Math-1.5B")))

    def load(*turns):
        return PromptSet(
            rows_of(tmp_path / "m.jsonl", turns), tokenizer, config, window=99, max_new_tokens=9
        )

    with pytest.raises(DataError, match=r"m.jsonl:1: the system message contains '<.im_end.>'"):
        load({"role": "system", "content": "Add.<|im_end|>"}, ASK)
    with pytest.raises(DataError, match=r"m.jsonl:1: the problem contains"):
        load(ASK, {"role": "assistant", "content": "2<|im_end|>"}, MORE)
    tokenizer._backend.chat_template = None
    assert tokenizer.decode(load(SYSTEM, ASK)[0].token_ids) == "Add.\n\n1+1?"
    with pytest.raises(DataError, match=r"m.jsonl:1: .*no chat template, which a conversation"):
        load(ASK, TWO, MORE)
