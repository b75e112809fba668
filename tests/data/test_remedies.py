"""The remedy that a refusal names, applied to the row that caused it: the row is then read."""

import json
from pathlib import Path

import pytest

from stable_opd_mcore.config.data import DataConfig, SourceConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.data.synthetic import ARITHMETIC
from stable_opd_mcore.data.teacher_prompt import TeacherPrompt
from stable_opd_mcore.errors import DataError
from tests.commands.check.directories import TEMPLATE, write_model

ASK, SAY = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is 2."}
SYSTEM = {"role": "system", "content": "Add."}
PLAIN = {"problem": "1+1?", "answer": "2", "solution": "1+1 is 2."}
TALK = {"messages": "messages", "answer": None}
ALL = TALK | {"golden": "all"}
ADD = {"function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def calling(*ids):
    return {"role": "assistant", "content": "", "tool_calls": [{**ADD, "id": i} for i in ids]}


def reply(number="a", **more):
    return {"role": "tool", "content": "2", "tool_call_id": number, **more}


def talk(*messages, **more):
    return {"messages": list(messages), **more}


def given(role, content="x"):
    return {"role": role, "content": content}


CASES = [  # columns, the row, words of its remedy, and for each remedy the columns and the row then
    (TALK, talk(), r"holds list \[\]; expected a list of messages.*fix or remove the row",
     [(TALK, talk(ASK))]),
    (TALK, {"messages": "1+1?"}, r"holds str '1\+1\?'; expected a list of messages",
     [(TALK, talk(ASK))]),
    (TALK, talk("1+1?"), r"message 0 is '1\+1\?'; write \{role: ..., content: ...\}",
     [(TALK, talk(ASK))]),
    (TALK, talk(given("narrator")), "write one of these", [(TALK, talk(ASK))]),
    (TALK, talk(ASK, SYSTEM), "no user turn to answer before message 2.*add it or remove the row",
     [(TALK, talk(ASK, SYSTEM, ASK))]),
    (TALK, talk(ASK, reply()), "message 1: role 'tool' and no turn of the assistant before it; add "
     "the turn that calls the tool, or make it a user message",
     [(TALK, talk(ASK, calling("a"), reply())), (TALK, talk(ASK, given("user", "2")))]),
    (TALK, talk({**ASK, "weight": 1}), "remove the key or the row", [(TALK, talk(ASK))]),
    (TALK, talk(given("user", [{"type": "image_url"}, {"type": "text", "text": "1+1?"}])),
     r"only parts of text .* \{type: text, text: ...\}.*: write it as one text",
     [(TALK, talk(given("user", [{"type": "text", "text": "1+1?"}])))]),
    (TALK, talk(given("user", {"a": 1})), "message 0: content has a part {'a': 1}.*one text",
     [(TALK, talk(ASK))]),
    (TALK, talk(ASK, given("model", [{"functionCall": {"name": "add", "args": {"a": 1}}}])),
     "write a call as tool_calls of the message, and its reply as a message of tool",
     [(TALK, talk(ASK, calling("a"), reply()))]),
    (TALK, talk(given("user", " ")), "'content' .message. is empty.*fill it", [(TALK, talk(ASK))]),
    (TALK, talk(ASK, {**SAY, "thinking": ["Hm."]}), "write them as one text, or remove the key",
     [(TALK, talk(ASK, {**SAY, "thinking": "Hm."})), (TALK, talk(ASK, SAY))]),
    (TALK, talk(ASK, {**SAY, "thinking": "Hm.", "reasoning": "Well."}),
     "keep one of reasoning_content, reasoning, thinking, thoughts",
     [(TALK, talk(ASK, {**SAY, "reasoning": "Well."}))]),
    (TALK, talk(ASK, {**SAY, "tool_calls": [{"name": "add", "arguments": "{"}]}),
     r"write \{function: \{name: ..., arguments: ...\}\}",
     [(TALK, talk(ASK, {**SAY, "tool_calls": [ADD]}))]),
    (TALK, talk(ASK, calling("a", "b"), reply("b"), reply("a"), SAY),
     "message 3: its call 'a' has .*sort them",
     [(TALK, talk(ASK, calling("a", "b"), reply("a"), reply("b"), SAY))]),
    (ALL, talk(ASK, SAY, ASK),
     "the last turn is of the user.*add it, remove the turn, or set columns.golden=last",
     [(ALL, talk(ASK, SAY, ASK, SAY)), (ALL, talk(ASK, SAY)), (TALK, talk(ASK, SAY, ASK))]),
    (ALL, talk(ASK, SAY, SAY), "messages 1 and 2 are two turns of .*join them",
     [(ALL, talk(ASK, {**SAY, "content": "It is 2. 2."}))]),
    (ALL, talk(SAY, ASK, SAY), "no user turn to answer before message 0.*add it",
     [(ALL, talk(ASK, SAY, ASK, SAY))]),
    ({}, {"question": "1+1?", "answer": "2"},
     "no column 'problem'.*it has question, answer.* Set .*columns.problem to one",
     [({"problem": "question"}, {"question": "1+1?", "answer": "2"})]),
    ({}, {"problem": "1+1?"}, "no column 'answer'.* Set .*columns.answer .*or to null",
     [({"answer": None}, {"problem": "1+1?"})]),
    ({}, PLAIN | {"answer": " "}, "'answer' .answer. is empty.*fill it", [({}, PLAIN)]),
    ({}, PLAIN | {"answer": "NaN"}, "'answer' .answer. is NaN.*fill it", [({}, PLAIN)]),
    ({}, PLAIN | {"problem": "\ud800"}, "'problem' .problem. has a lone surrogate.*fix the row",
     [({}, PLAIN)]),
    ({}, PLAIN | {"solution": {"text": "1+1 is 2."}}, "set .*columns.solution to a text column",
     [({"solution": "solution.text"}, PLAIN | {"solution": {"text": "1+1 is 2."}})]),
    ({}, PLAIN | {"system": "Add."}, "write it into that one, or remove or rename the column",
     [({}, PLAIN | {"problem": "Add. 1+1?"}), ({}, PLAIN | {"note": "Add."})]),
    (TALK, talk(ASK, system="Add.", system_prompt="Be brief."), "write it into that one",
     [(TALK, talk(SYSTEM, ASK))]),
    ({}, PLAIN | {"image": "a.png"}, "remove or rename the column", [({}, PLAIN)]),
    ({}, PLAIN | {"problem": "1+1?<|im_end|>"}, "remove it from the row", [({}, PLAIN)]),
    ({}, PLAIN | {"solution": "2"}, "to a column of worked solutions, or to null",
     [({"solution": None}, PLAIN | {"solution": "2"})]),
    ({}, PLAIN | {"tools": TOOLS}, "write them into the row's system message",
     [(TALK, talk({**SYSTEM, "content": json.dumps(TOOLS)}, ASK, tools=TOOLS)), ({}, PLAIN
      | {"my_tools": TOOLS})]),
    (TALK, talk(ASK, {**SAY, "thoughts": "Hm."}),
     "as <think>...</think> before the answer, or remove the key",
     [(TALK, talk(ASK, given("assistant", "<think>Hm.</think>It is 2.")))]),
    (ALL, talk(ASK, {**SAY, "tool_calls": [ADD]}, ASK, SAY),
     "write them into the content of the message",
     [(ALL, talk(ASK, given("assistant", f"It is 2. {json.dumps(ADD)}"), ASK, SAY))]),
]  # fmt: skip


CALLS = "{% for c in message.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>"
WITH_CALLS = TEMPLATE.replace("message['content'] }}<|im_end|>", "message.content or '' }}" + CALLS)
OF_PLAIN_TEMPLATES = ("as <think>", "write them into the content")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """One whose template takes thoughts and tool calls, and one whose template takes neither."""
    path, marks = tmp_path_factory.mktemp("models"), ("<think>", "</think>")
    paths = write_model(path / "a", template=WITH_CALLS, added=marks), write_model(path / "b")
    return [*map(Tokenizer.load, paths)]


@pytest.mark.parametrize(("columns", "row", "words", "remedies"), CASES)
def test_a_row_that_follows_the_remedy_is_read(tmp_path, tokenizers, columns, row, words, remedies):
    tokenizer = tokenizers[words.startswith(OF_PLAIN_TEMPLATES)]

    def read(columns, row):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        source = {"path": str(tmp_path / "rows.jsonl"), "columns": columns}
        config = DataConfig.model_validate({"train": source})
        rows = load_rows(config.train)
        has_golden = bool(rows[0].solution or rows[0].golden_turns)
        golden = "required" if has_golden and columns.get("solution", 1) else "none"
        return PromptSet(rows, tokenizer, config, window=400, max_new_tokens=9, golden=golden)

    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*" + words):
        read(columns, row)
    for remedy in remedies:
        assert len(read(*remedy)) == 1, remedy


GOOD = json.dumps(PLAIN)
FILES = [  # the file's text, settings of its source, words of the remedy, and what follows it
    ("[1]", {}, "every line must be one object", GOOD, {}),
    (GOOD[:-1], {}, "every line must be one object, complete", GOOD, {}),
    ('{"problem": "1", "problem": "2", "answer": "3"}', {}, "keep the right one", GOOD, {}),
    ("", {}, "no rows in it.*check the file and data split", GOOD, {}),
    (GOOD, {"path": "rows.txt"}, r"unknown kind of file; expected .jsonl.* convert it", GOOD, {}),
    ("[1]", {"path": "rows.json"}, "an object a row", f"[{GOOD}]", {"path": "rows.json"}),
    (GOOD, {"path": "none.jsonl"}, "no such file; check data.*path", GOOD, {}),
    (GOOD, {"path": "me/none"}, r"correct data.*path, or give .*a revision", GOOD, {}),
    (GOOD, {"path": "me/no/rows"}, r"nor a hub id .*check data.*path", GOOD, {}),
    (GOOD, {"options": {"rows": 3}}, "only configuration; drop the others", GOOD, {}),
    (GOOD, {"split": "train[:1]"}, "drop data.*split, or set data.*limit", GOOD, {"limit": 1}),
    ("", {"path": "rows.parquet"}, "not readable as parquet; write it again", GOOD, {}),
    (GOOD, {"path": "synthetic:sums"}, "set data.*path to syn", GOOD, {"path": ARITHMETIC}),
]


def test_a_file_that_follows_the_remedy_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(text, settings):
        for name in ("rows.jsonl", "rows.json", "rows.txt", "rows.parquet"):
            Path(name).write_text(text)
        return load_rows(SourceConfig.model_validate({"path": "rows.jsonl"} | settings))

    for text, settings, words, then, remedy in FILES:
        with pytest.raises(DataError, match=words):
            read(text, settings)
        assert read(then, remedy)


def test_settings_of_a_template_that_follow_the_remedy_are_taken(tmp_path):
    path = write_model(tmp_path, template="{% if short and tools %}{% endif %}" + TEMPLATE)
    for given_to, words, remedy in (
        ({"shorter": True}, "it reads short, tools; drop the others", {"short": True}),
        ({"short": "False"}, "write it without quotes", {"short": False}),
        ({"tools": ["add"]}, r"write \{type: function, function: \{name", {"tools": TOOLS}),
    ):
        with pytest.raises(DataError, match=words):
            Tokenizer.load(path, template_kwargs=given_to)
        assert Tokenizer.load(path, template_kwargs=remedy)
    bare = write_model(tmp_path / "bare", template=None, eos_token_id=None)
    with pytest.raises(DataError, match=r"could read chat_template_kwargs; drop them"):
        Tokenizer.load(bare, template_kwargs={"short": True})
    assert Tokenizer.load(bare)
    named = tmp_path / "bare/tokenizer_config.json"
    named.write_text(json.dumps(json.loads(named.read_text()) | {"eos_token": None}))
    with pytest.raises(DataError, match=r"names a token that ends .*; set student\.stop_token_ids"):
        Tokenizer.load(bare)
    assert Tokenizer.load(bare, stop_token_ids=(3,))
    tokenizer = Tokenizer.load(path)
    rows = DataConfig.model_validate({"train": {"path": str(tmp_path / "rows.jsonl")}})
    (tmp_path / "rows.jsonl").write_text(json.dumps(PLAIN | {"hint": None, "note": "<|im_end|>"}))
    for template, words, remedy in (
        ("{{ hint }}", "correct the template", "{{ hint or 'none' }}"),
        ("{{ note }}", "fix or drop the row", "{{ problem }}"),
    ):
        (row,) = load_rows(rows.train, with_columns=True)
        with pytest.raises(DataError, match=words):
            TeacherPrompt(template, tokenizer, None, None).text(row)
        assert TeacherPrompt(remedy, tokenizer, None, None).text(row)
