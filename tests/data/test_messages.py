"""Conversations of a source: what is the prompt, what the golden solution, and hostile rows."""

import json
import re
from copy import copy
from dataclasses import replace

import numpy as np
import pytest

from stable_opd_mcore.config.data import ColumnsConfig, DataConfig, SourceConfig
from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.samples import golden_samples
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.data.teacher_prompt import TeacherPrompt
from stable_opd_mcore.data.thoughts import golden_response
from stable_opd_mcore.errors import DataError
from tests.commands.check.directories import write_model
from tests.data.real_tokenizers import MATH, QWEN3, QWEN25, R1, THINKING, real_tokenizer

SYSTEM, ASK = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}
TWO, MORE = {"role": "assistant", "content": "It is 2."}, {"role": "user", "content": "And 2+2?"}
FOUR = {"role": "assistant", "content": "It is 4."}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
TOOL = {"role": "tool", "content": "2", "tool_call_id": "7"}


CALLS = {"role": "assistant", "tool_calls": [{**CALL["tool_calls"][0], "id": n} for n in "ab"]}


def reply_to(number):
    return {**TOOL, "tool_call_id": number}


def call_of(arguments):
    return {"function": {"name": "add", "arguments": arguments}}


CALL_7 = {**CALL, "tool_calls": [{**call_of({"a": 1}), "id": "7"}]}
USE = {"type": "tool_use", "id": "7", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "7"}


def rows_of(path, *conversations, answer=None, **columns):
    lines = [json.dumps({"messages": each, "solution": "S", "gold": "4"}) for each in conversations]
    path.write_text("\n".join(lines))
    columns = ColumnsConfig(messages="messages", answer=answer, **columns)
    return load_rows(SourceConfig(path=str(path), columns=columns))


def test_the_last_assistant_turn_is_the_golden_solution(tmp_path):
    assert rows_of(tmp_path / "m.jsonl", [ASK, CALLS, *map(reply_to, "ab"), TWO])
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
    names = ColumnsConfig(messages="prompt", solution="completion", answer=None)
    for said, solution in (([TWO], "It is 2."), ('[{"name": "add"}]', '[{"name": "add"}]')):
        (tmp_path / "m.jsonl").write_text(json.dumps({"prompt": [ASK], "completion": said}))  # TRL
        (row,) = load_rows(SourceConfig(path=str(tmp_path / "m.jsonl"), columns=names))
        assert (row.messages, row.solution) == ((ASK,), solution)


def shared(name, value):
    return {"from": name, "value": value}


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ([shared("human", "1+1?"), shared("gpt", "It is 2.")], [ASK, TWO]),
        ([shared("system", "Add."), shared("user", "1+1?")], [SYSTEM, ASK]),
        (
            [ASK, {**CALL, "tool_calls": [{"id": "7", **call_of({})["function"]}]}, TOOL, TWO],
            [ASK, {**CALL, "tool_calls": [{"id": "7", **call_of({})}]}, TOOL, TWO],
        ),
        ([{**SYSTEM, "role": "developer"}, ASK, {**TWO, "role": "model"}], [SYSTEM, ASK, TWO]),
        (
            [
                shared("human", "1+1?"),
                shared("function_call", '{"name": "add", "arguments": {"a": 1}}'),
                shared("observation", ""),
                shared("gpt", "It is 2."),
            ],
            [
                ASK,
                {**CALL, "tool_calls": [{"type": "function", **CALL["tool_calls"][0]}]},
                {"role": "tool", "content": ""},
                TWO,
            ],
        ),
        (
            [ASK, shared("function_call", '[{"name": "add", "arguments": "{}"}]'), TOOL, TWO],
            [ASK, {**CALL, "tool_calls": [{"type": "function", **call_of("{}")}]}, TOOL, TWO],
        ),
        ([shared("User", "1+1?"), shared("ASSISTANT", "It is 2.")], [ASK, TWO]),
        ({"role": ["user", "assistant"], "content": ["1+1?", "It is 2."]}, [ASK, TWO]),
        (str([ASK, TWO]), [ASK, TWO]),  # a table of text wrote it
        ([{"type": "human", "content": "1+1?"}, {"type": "ai", "content": "It is 2."}], [ASK, TWO]),
        (
            [
                {"role": "user", "parts": [{"text": "1+"}, {"text": "1?"}]},
                {"role": "model", "parts": [{"text": "It is 2."}]},
            ],
            [ASK, TWO],
        ),
        (
            [
                {
                    "type": "message",
                    "role": "user",
                    "content": {"type": "input_text", "text": "1+1?"},
                },
                {"role": "assistant", "channel": "analysis", "content": "Hm."},
                {"role": "assistant", "channel": "final", "content": "It is 2."},
            ],
            [ASK, {**TWO, "thinking": "Hm."}],
        ),
        (
            [
                ASK,
                {"role": "assistant", "content": [USE, {"type": "text", "text": "I add."}]},
                {"role": "user", "content": [{**RESULT, "content": [{"text": "2"}]}]},
                TWO,
            ],
            [ASK, {**CALL_7, "content": "I add."}, TOOL, TWO],
        ),
        *(
            (
                [ASK, {"role": "assistant", "tool_calls": [call]}, TOOL, TWO],
                [ASK, CALL_7, TOOL, TWO],
            )
            for call in (
                {"type": "tool_call", "id": 7, "name": "add", "args": {"a": 1}},
                {"index": 0, "id": "7", "function": {"name": "add", "parameters": "{'a': 1}"}},
                {"id": "7", **call_of(json.dumps('{"a": 1}'))},
            )
        ),
    ],
)
def test_conversations_of_sharegpt_and_roles_by_other_names_are_those_of_openai(
    tmp_path, given, same
):
    other, own = rows_of(tmp_path / "m.jsonl", given, same, golden="all")
    assert (other.messages, other.golden_turns) == (own.messages, own.golden_turns)
    assert other.solution == own.solution


def test_a_conversation_is_rendered_with_its_own_system_message_else_the_configured_one(tmp_path):
    tokenizer = real_tokenizer(MATH)
    rows = rows_of(tmp_path / "m.jsonl", [SYSTEM, ASK, TWO, MORE, FOUR], [ASK, FOUR])
    config = DataConfig(train=SourceConfig(path="x"), system_prompt="Count.")
    prompts = PromptSet(rows, tokenizer, config, window=99, max_new_tokens=9, golden="required")
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


HOSTILE = [  # more, with their remedies: test_remedies.py
    (
        [{"role": "tool", "content": "x"}],
        "message 0: role 'tool' and no turn of the assistant before it; add",
    ),
    ([{"content": "x"}], "message 0: role None"),
    ([{"role": ["user"], "content": "x"}], "message 0: role ['user']"),
    ({"role": ["user", "assistant"], "content": ["x"]}, "holds dict {'role': ['user'"),
    ([{"role": "user", "content": True}], "message 0: content holds bool, not text"),
    ([{"from": "human", "value": ""}], "message 0: column 'content' (message) is empty"),
    (
        [ASK, {"from": "function_call", "value": "add(1)"}],
        "message 1: tool call 'add(1)'; write {fun",
    ),
    ([{"role": "user", "content": "\ud800"}], "has a lone surrogate"),
    (
        [{**ASK, "tool_calls": [1]}],
        "message 0 has keys that are not read of a message of this role, tool_calls",
    ),
    ([ASK, {**TWO, "tool_calls": [{"id": "1"}]}], "message 1: tool call {'id': '1'}; write {f"),
    ([ASK, {**TWO, "tool_calls": "add"}], "message 1: tool call 'add'; write {function: {na"),
    ([ASK, {**TWO, "tool_calls": [call_of("[1]")]}], "message 1: tool call {'function'"),
    ([ASK, {**TWO, "tool_calls": [call_of("{")]}], "the arguments as an object or its JSON"),
    ([ASK, CALLS, reply_to("a"), reply_to("a"), TWO], "message 3: its call 'a' has a reply"),
    ([SYSTEM], "no user turn to answer"),
]  # messages, message


def test_hostile_conversations_are_refused_with_file_row_and_key(tmp_path):
    for messages, message in HOSTILE:
        where = re.escape(f"{tmp_path}/m.jsonl:2: column 'messages' (messages)")
        with pytest.raises(DataError, match=f"^{where}.*{re.escape(message)}"):
            rows_of(tmp_path / "m.jsonl", [ASK, {**TWO, "tool_calls": None}], messages)


WEATHER = {"name": "get_weather", "parameters": {"type": "object"}}
BARE = {"type": "function", "function": {"name": "get_weather"}}
NAMED = {"role": "system", "content": 'Tools: [{"name": "get_weather"}]'}
POLICY = {"role": "system", "content": "Prefer get_weather."}
FRAMED = {"type": "function", "function": WEATHER}


@pytest.mark.parametrize(
    ("columns", "turns", "schema"),  # what the template writes; None: nothing
    [
        ({"tools": [BARE]}, [ASK], BARE),
        ({"tools": json.dumps([BARE])}, [ASK], BARE),
        ({"functions": [WEATHER]}, [ASK], FRAMED),
        ({"tools": [{"name": "get_weather", "input_schema": {"type": "object"}}]}, [ASK], FRAMED),
        ({"tools": str([{"type": "function", **WEATHER}])}, [ASK], FRAMED),
        ({"tools": {"function_declarations": [WEATHER]}}, [ASK], FRAMED),
        ({"tools": [WEATHER]}, None, FRAMED),
        ({"tools": [FRAMED]}, [ASK, {**CALL, "content": "get_weather"}, TOOL], FRAMED),
        ({"tools": [BARE]}, [POLICY, ASK], BARE),
        ({"tools": [BARE]}, [NAMED, ASK], None),
        ({"tools": []}, [ASK], None),
        ({"tools": ["saw"], "functions": "f(x) = 2"}, [ASK], None),
        ({"tools": "[", "functions": [{"name": "f", "code": "..."}, None]}, None, None),
    ],
)
def test_tools_of_a_column_are_written_by_the_template_or_refused(tmp_path, columns, turns, schema):
    record = {"problem": "1+1?", "messages": turns, "level": 3, **columns}
    (tmp_path / "m.jsonl").write_text(json.dumps(record))
    names = ColumnsConfig(messages=turns and "messages", answer=None)
    source = SourceConfig(path=str(tmp_path / "m.jsonl"), columns=names)
    rows, config = load_rows(source, required=("level",)), DataConfig(train=source)

    def prompts_of(name, own="Level {{ level }}"):
        tokenizer = real_tokenizer(name)
        teacher = TeacherPrompt(own, tokenizer, None, None) if own else None
        sizes = {"window": 900, "max_new_tokens": 9}
        (prompt,) = PromptSet(rows, tokenizer, config, teacher=teacher, **sizes)
        both = prompt.token_ids, prompt.teacher_token_ids
        return ["".join(tokenizer.pieces(token_ids)) for token_ids in both if token_ids]

    for text in prompts_of(QWEN25):
        assert text.count(f"\n{json.dumps(schema)}\n") == (schema is not None)
    if schema is None:
        assert "# Tools" not in "".join(prompts_of(R1))
    if schema is None or turns == [POLICY, ASK] or (turns and turns[1:]):
        return
    with pytest.raises(DataError, match=r"m\.jsonl:1: its prompt does not name .* get_weather"):
        prompts_of(R1, own=None)
    with pytest.raises(DataError, match=r"m\.jsonl:1: teacher.prompt: its prompt does not name"):
        prompts_of(R1)
    rows = [replace(row, environment="of the run") for row in rows]  # which may name them
    assert prompts_of(R1, own=None)


def golden_set(path, tokenizer, *turns, golden="required", golden_turns="last"):
    config = DataConfig(train=SourceConfig(path="x"), system_prompt="Count.")
    rows = rows_of(path / "m.jsonl", turns, golden=golden_turns)
    return PromptSet(rows, tokenizer, config, window=300, max_new_tokens=9, golden=golden)


def golden_prompt(*args, **kwargs):
    return golden_set(*args, **kwargs)[0]


THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is 2."}
CONVERSATIONS = [
    [ASK, TWO],
    [SYSTEM, ASK, THOUGHT, MORE, FOUR],
    [ASK, MORE, TWO, MORE, ASK, THOUGHT, ASK, FOUR],
]
WITH_TOOLS = [
    [ASK, CALL, TOOL, THOUGHT],
    [
        ASK,
        {**CALL, "content": "I add."},
        TOOL,
        TOOL,
        {**CALL, "content": ""},
        TOOL,
        FOUR,
        MORE,
        TWO,
    ],
]


@pytest.mark.parametrize("stop", [None, (151643,)])
@pytest.mark.parametrize("name", [MATH, QWEN25, QWEN3, THINKING, R1])
def test_all_golden_turns_are_what_a_rollout_of_the_same_texts_would_be(tmp_path, name, stop):
    tokenizer = copy(real_tokenizer(name))
    tokenizer.stop_token_ids = stop or tokenizer.stop_token_ids
    bridge = Bridge(tokenizer)
    for turns in CONVERSATIONS + WITH_TOOLS * (name != R1):
        first = [turn["role"] for turn in turns].index("assistant")
        text, places, new = tokenizer.render_turns(turns[:first], "Count."), [], []
        context = tokenizer.encode(text)
        for turn in turns[first:]:
            if turn["role"] != "assistant":
                new.append(turn)
                continue
            if new:
                observed = bridge.append(new, context[-1])
                if observed.replaces_end:  # the template's end is no golden token
                    context, places = context[:-1], places[:-1]
                context, text, new = [*context, *observed.token_ids], observed.text, []
            said = golden_response(said_of(turn, name), text)
            sampled = [*tokenizer.encode(said), tokenizer.stop_token_ids[0]]
            places += range(len(context), len(context) + len(sampled))
            context += sampled
        prompt = golden_prompt(tmp_path, tokenizer, *turns, golden_turns="all")
        (sample,) = golden_samples([prompt])
        assert sample.token_ids.tolist() == context
        assert sample.places.tolist() == places
        assert sample.num_prompt_tokens == places[0] == len(prompt.token_ids)
        assert sample.trained.all()


def said_of(turn, name=None):
    """The text of a turn that a tokenizer's student would sample."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    parts = [turn.get("content"), call if "tool_calls" in turn else None]
    text = "\n".join(filter(None, parts))
    no_thought = "<think>\n\n</think>\n\n" if name == QWEN3 and "<think>" not in text else ""
    return no_thought + text


def test_golden_turns_keep_their_thoughts_and_observe_the_opened_ones(tmp_path):
    tokenizer = real_tokenizer(THINKING)
    turns = [ASK, THOUGHT, MORE, FOUR]
    prompts = golden_set(tmp_path, tokenizer, *turns, golden_turns="all")
    prompt = prompts[0]
    assert prompts.golden_lengths() == [max(prompt.golden_turn_tokens[::2])]
    assert "".join(tokenizer.pieces(prompt.token_ids)).endswith(
        "1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    lengths = np.cumsum(prompt.golden_turn_tokens)[:-1]
    parts = np.split(np.array(prompt.golden_token_ids), lengths)
    assert ["".join(tokenizer.pieces(part.tolist())) for part in parts] == [
        "Hm.\n</think>\n\nIt is 2.<|im_end|>",
        "\n<|im_start|>user\nAnd 2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "\n</think>\n\nIt is 4.<|im_end|>",
    ]
    last = golden_prompt(tmp_path, tokenizer, *turns)
    assert tokenizer.decode(last.golden_token_ids) == "\n</think>\n\nIt is 4."
    assert "Hm." not in tokenizer.decode(last.token_ids)  # the template deletes it from a prompt
    assert len(last.golden_turn_tokens) == 1


def test_a_call_may_be_the_golden_solution_and_stand_in_the_prompt(tmp_path):
    tokenizer = real_tokenizer(QWEN3)
    prompt = golden_prompt(tmp_path, tokenizer, ASK, CALL, TOOL, CALL)
    call = said_of(CALL)
    assert tokenizer.decode(prompt.golden_token_ids) == said_of(CALL, QWEN3)
    assert f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>" in (
        tokenizer.decode(prompt.token_ids)
    )
    assert golden_prompt(tmp_path, tokenizer, ASK, CALL, TOOL).golden_token_ids is not None


def test_hostile_golden_turns_are_refused_with_the_row(tmp_path):
    r1, qwen = real_tokenizer(R1), real_tokenizer(QWEN3)
    hostile = {**CALL, "tool_calls": [call_of({"a": "<|im_end|>"})]}
    for tokenizer, turns, words in (
        (r1, [ASK, TWO, TOOL, FOUR], "a tool message cannot follow .*make it a user message"),
        (r1, [ASK, CALL, MORE, FOUR], "does not write tool calls after a text"),
        (qwen, [ASK, hostile, TOOL, FOUR], "the tool calls contains '<.im_end.>'"),
        (qwen, [ASK, TWO, {**MORE, "content": "<|im_end|>"}, FOUR], "the solution contains"),
    ):
        with pytest.raises(DataError, match=f"m.jsonl:1: .*{words}"):
            golden_prompt(tmp_path, tokenizer, *turns, golden_turns="all")
    for golden in ("none", "by_source"):
        with pytest.raises(DataError, match=r"m.jsonl:1: .*does not write tool calls"):
            golden_prompt(tmp_path, r1, ASK, CALL, TOOL, FOUR, golden=golden)


def test_what_the_tokenizer_cannot_take_is_refused_with_the_row(tmp_path):
    config = DataConfig(train=SourceConfig(path="x"))
    tokenizer = Tokenizer.load(write_model(tmp_path / "model"))

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
