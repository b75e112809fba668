"""Conversations as they are: thoughts in keys, ids of calls, parts, empty replies, other places."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from stable_opd_mcore.config.data import ColumnsConfig, DataConfig, SourceConfig
from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.data.sources import load_rows
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.inputs.example_episode import example_turn
from tests.commands.check.directories import write_model
from tests.data.real_tokenizers import GLM45, MATH, QWEN3, R1, THINKING, real_tokenizer

ASK = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "It is 2."}
R1_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
KEYS = ("reasoning_content", "reasoning", "thinking", "thoughts")
MARKED = "<think>\nHm.\n</think>\n\nIt is 2."
CHANNELS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
HARMONY = (  # gpt-oss's form, reduced
    "{% set f = namespace() %}{% for m in messages %}{% if m.tool_calls %}"
    "{% set f.name = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ f.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments|tojson }}<|call|>"
    "{% elif m.role == 'tool' %}{% if not f.name %}{{ raise_exception('no call') }}{% endif %}"
    "<|start|>functions.{{ f.name }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content|tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}{% if '<|channel|>' in m.content %}"
    "{{ raise_exception('channels belong into thinking') }}{% endif %}"
    "{% if m.thinking and loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OF_HARMONY = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>")
STRICT = (  # Mistral's form, reduced
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{% if c.id|length != 9 %}"
    "{{ raise_exception('nine characters') }}{% endif %}{{ c.function|tojson }} {{ c.id }};"
    "{% endfor %}</s>{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('nine characters') }}"
    "{% endif %}[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% endif %}{% endfor %}"
)
OF_STRICT = ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")


def harmony(path):
    model = write_model(path, template=HARMONY, added=OF_HARMONY, eos_token_id=None)
    names = {name: token for token, name in Tokenizer.load(model).names_by_id.items()}
    return Tokenizer.load(model, [names[each] for each in ("<|return|>", "<|call|>")])


def strict(path):
    model = write_model(path, template=STRICT, added=OF_STRICT, rename={"<|endoftext|>": "</s>"})
    return Tokenizer.load(model)


def rows_of(path, *conversations, **columns):
    path.write_text("\n".join(json.dumps({"messages": each}) for each in conversations))
    columns = ColumnsConfig(messages="messages", answer=None, **columns)
    return load_rows(SourceConfig(path=str(path), columns=columns))


def goldens(rows, tokenizer):
    config = DataConfig(train=SourceConfig(path="x"))
    settings = {"window": 500, "max_new_tokens": 9, "golden": "required"}
    prompts = PromptSet(rows, tokenizer, config, **settings)
    chosen = prompts.select(range(len(prompts)))
    return ["".join(tokenizer.pieces(prompt.golden_token_ids or ())) for prompt in chosen]


@pytest.mark.parametrize(
    ("name", "written", "plain"),  # with a thought, without one
    [
        (QWEN3, f"{MARKED}<|im_end|>", "<think>\n\n</think>\n\nIt is 2.<|im_end|>"),
        (THINKING, "Hm.\n</think>\n\nIt is 2.<|im_end|>", "\n</think>\n\nIt is 2.<|im_end|>"),
        (R1, f"{MARKED}{R1_END}", f"It is 2.{R1_END}"),
        (
            "harmony",
            f"{CHANNELS}It is 2.<|return|>",
            "<|channel|>final<|message|>It is 2.<|return|>",
        ),
        (
            GLM45,
            "\n<think>Hm.</think>\nIt is 2.<|endoftext|>",
            "\n<think></think>\nIt is 2.<|endoftext|>",
        ),
    ],
)
def test_a_thought_in_a_key_is_what_the_student_would_sample(tmp_path, name, written, plain):
    tokenizer = harmony(tmp_path / "m") if name == "harmony" else real_tokenizer(name)
    in_keys = [[ASK, {**ANSWER, key: " Hm.\n"}] for key in KEYS]
    text = {"type": "text", "text": "It is 2."}
    thoughts = [
        *({"type": "reasoning", key: "Hm."} for key in ("reasoning", "text")),
        {"type": "thinking", "thinking": "Hm."},
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
    ]
    twice = {**ANSWER, "reasoning": "Hm.", "reasoning_content": "Hm."}
    more = [[ASK, twice], *([ASK, {**ANSWER, "content": [each, text]}] for each in thoughts)]
    rows = rows_of(tmp_path / "rows.jsonl", *in_keys, *more)
    assert goldens(rows, tokenizer) == [written] * len(rows)
    empty = [[ASK, {**ANSWER, key: value}] for key in KEYS for value in ("", " ", None)]
    empty.append([ASK, {**ANSWER, "content": [{"type": "thinking", "thinking": ""}, text]}])
    rows = rows_of(tmp_path / "rows.jsonl", *empty, [ASK, ANSWER])
    assert {*goldens(rows, tokenizer)} == {plain}
    assert {row.solution for row in rows} == {"It is 2."}


def test_a_thought_that_nobody_can_write_is_refused_and_the_remedy_is_read(tmp_path):
    tokenizer = real_tokenizer(MATH)
    (row,) = rows_of(tmp_path / "rows.jsonl", [ASK, {**ANSWER, "thinking": "Hm."}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .* into the content .* as <think>"):
        goldens([row], tokenizer)
    (row,) = rows_of(tmp_path / "rows.jsonl", [ASK, {**ANSWER, "content": MARKED}])
    assert goldens([row], tokenizer) == [f"{MARKED}<|im_end|>"]
    for thoughts in ({"thinking": ["Hm."]}, {"reasoning": "a", "thoughts": "b"}):
        with pytest.raises(DataError, match=r"message 1.*(not text|two different thoughts)"):
            rows_of(tmp_path / "rows.jsonl", [ASK, {**ANSWER, **thoughts}])


@pytest.mark.parametrize("name", [QWEN3, THINKING, R1, MATH, "harmony"])
def test_every_family_has_a_well_formed_example_turn_that_its_template_takes(tmp_path, name):
    tokenizer = harmony(tmp_path) if name == "harmony" else real_tokenizer(name)
    said = example_turn(tokenizer)
    expected = {
        MATH: "1+1",
        "harmony": f"{CHANNELS}1+1".replace("Hm.", "1+1"),
        THINKING: "1+1\n</think>\n\n1+1",
    }
    assert said == expected.get(name, "<think>\n1+1\n</think>\n\n1+1")
    turns = [ASK, {"role": "assistant", "content": said}, ASK]
    assert Bridge(tokenizer).render(turns, ()).text == tokenizer.render_turns(turns)


def test_one_token_ends_a_turn_in_the_history_the_templates(tmp_path):
    of_gpt_oss, qwen = harmony(tmp_path / "m"), real_tokenizer(QWEN3)
    for tokenizer, stop, end in (
        (of_gpt_oss, "<|return|>", "<|end|>"),
        (qwen, "<|endoftext|>", "<|im_end|>"),
        (qwen, "<|im_end|>", "<|im_end|>"),
    ):
        prompt = tokenizer.encode(tokenizer.render_turns([ASK]))
        context = [*prompt, *tokenizer.encode(f"It is 2.{stop}")]
        seen = Bridge(tokenizer).append([ASK], context[-1]).after(context)
        assert seen.restarts is (stop != end)
        whole = seen.token_ids if seen.restarts else [*context, *seen.token_ids]
        text = "".join(tokenizer.pieces(whole))
        assert stop == end or stop not in text
        assert text.count(f"It is 2.{end}") == 1
        cut = [*prompt, *tokenizer.encode("It is")]
        assert not Bridge(tokenizer).append([ASK], cut[-1]).after(cut).restarts
    rows = rows_of(tmp_path / "rows.jsonl", [ASK, ANSWER, ASK, ANSWER], golden="all")
    (golden,) = goldens(rows, of_gpt_oss)
    final = "<|channel|>final<|message|>It is 2."
    between = "<|end|><|start|>user<|message|>1+1?<|end|><|start|>assistant"
    assert golden == f"{final}{between}{final}<|return|>"


def call(number, arguments, **more):
    return {"function": {"name": "add", "arguments": arguments}, **more}


@pytest.mark.parametrize("ids", [("call_0123456789abcdef", "b"), ("abcdefghi", "123456789"), ()])
def test_a_strict_template_gets_ids_that_it_takes_the_same_for_call_and_reply(tmp_path, ids):
    tokenizer = strict(tmp_path / "m")
    named = [{"id": each} for each in ids] or [{}, {}]
    replies = [{"tool_call_id": each} for each in ids] or [{}, {}]
    calls = [call(n, {"a": n}, **own) for n, own in enumerate(named)]
    asks = {"role": "assistant", "content": None, "tool_calls": calls}
    answers = [{"role": "tool", "content": str(n), **own} for n, own in enumerate(replies)]
    rows = rows_of(tmp_path / "rows.jsonl", [ASK, asks, *answers, ANSWER], golden="all")
    (golden,) = goldens(rows, tokenizer)
    called, _, replied = golden.partition("</s>")
    short = [part.rpartition(" ")[2] for part in called.split(";")[:2]]
    assert [len(each) for each in short] == [9, 9]
    assert len(set(short)) == 2
    assert [f"[TOOL_RESULTS]{n} {own}[/TOOL_RESULTS]" in replied for n, own in enumerate(short)]
    assert (tuple(short) == ids) is (ids == ("abcdefghi", "123456789"))
    talk = [ASK, {**asks, "content": "I add."}, *answers, ANSWER]
    with_text = rows_of(tmp_path / "rows.jsonl", talk, golden="all")
    with pytest.raises(DataError, match="no text next to tool calls; remove the text of the mess"):
        goldens(with_text, tokenizer)
    whole = tokenizer.render([*rows[0].messages, *rows[0].golden_turns])
    assert all(whole.count(own) == 2 for own in short)


def test_a_call_of_gpt_oss_ends_with_its_own_token_and_stands_by_itself(tmp_path):
    tokenizer = harmony(tmp_path / "m")
    asks, replies = {**ANSWER, "content": None, "tool_calls": [call(0, {"a": 1})]}, {"role": "tool"}
    replies |= {"content": "2"}
    called = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    observed = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|>'
    final = "<|start|>assistant<|channel|>final<|message|>It is 2.<|return|>"

    def golden(*turns, columns="all"):
        return goldens(rows_of(tmp_path / "rows.jsonl", [ASK, *turns], golden=columns), tokenizer)

    assert golden(asks, columns="last") == [called]
    assert golden(asks, replies, ANSWER) == [f"{called}{observed}{final}"]
    two = {**asks, "tool_calls": [call(0, {"a": 1}), call(1, {"a": 2})]}
    for turns in ((two,), (two, replies, replies, ANSWER)):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: .*write each call and its reply as m"):
            golden(*turns, columns="last")
    alone = [{**asks, "tool_calls": [each]} for each in two["tool_calls"]]
    assert golden(alone[0], replies, alone[1], replies, ANSWER) == [
        f"{called}{observed}<|start|>assistant{called.replace('1', '2')}{observed}{final}"
    ]
    config = DataConfig(train=SourceConfig(path="x"))
    rows = rows_of(tmp_path / "rows.jsonl", [ASK, asks, replies, ANSWER], golden="all")
    (prompt,) = PromptSet(rows, tokenizer, config, window=500, max_new_tokens=9, golden="required")
    sampled = prompt.golden_turn_tokens[0]  # the end of the call is trained, not observed
    assert tokenizer.pieces(prompt.golden_token_ids[sampled - 1 : sampled]) == ["<|call|>"]
    context = tokenizer.encode(called)
    named = [{**replies, "name": name, "content": name} for name in ("add", "sub")]
    sub = {"function": {"name": "sub", "arguments": {}}}
    for said in ({**two, "tool_calls": [call(0, {"a": 1}), sub]}, ANSWER):
        read = Bridge(tokenizer).append([*named, ASK], context[-1], said=said).token_ids
        assert "".join(tokenizer.pieces(read)) == (  # each reply after its own call
            "".join(observed.replace("add", name).replace("2", name) for name in ("add", "sub"))
            + "<|start|>user<|message|>1+1?<|end|><|start|>assistant"
        )
    with pytest.raises(DataError, match="the function's name before a tool's reply; give the too"):
        Bridge(tokenizer).append([replies, replies], context[-1])
    Bridge(tokenizer).append(named, context[-1])
    user = Bridge(tokenizer).append([ASK], context[-1]).after(context)
    assert not user.restarts
    assert tokenizer.pieces(user.token_ids)[:2] == ["<|start|>", "u"]


def test_the_older_form_of_calls_is_read_as_the_newer_one(tmp_path):
    """The older form is OpenAI's `function_call` with the role `function`. Arguments may be a
    text or an object, and the messages may be a prompt."""
    function = {"name": "add", "arguments": '{"a": 1}'}
    asks, replies = {"role": "assistant"}, {"name": "add", "content": "2"}
    newer = [{**asks, "tool_calls": [{"function": function}]}, {**replies, "role": "tool"}]
    older = [
        [{**asks, "content": None, "function_call": call}, {**replies, "role": "function"}]
        for call in (function, {**function, "arguments": {"a": 1}})
    ]
    talks = [[ASK, *turns, ANSWER] for turns in (newer, *older)]
    for golden in ("all", "last"):
        rows = rows_of(tmp_path / "rows.jsonl", *talks, golden=golden)
        assert len(set(goldens(rows, real_tokenizer(QWEN3)))) == 1
        assert len({real_tokenizer(QWEN3).render(row.messages) for row in rows}) == 1


def test_one_conversation_is_one_row_wherever_it_lies(tmp_path):
    """Text or object, with nulls of other rows, in JSON Lines, parquet, a folder, a saved set."""
    import datasets

    def talk(arguments, content):
        asks = {"role": "assistant", "content": "I ask.", "tool_calls": [call(0, arguments)]}
        replies = {"role": "tool", "content": content}
        return [ASK, asks, replies, {**ANSWER, "reasoning_content": "Hm."}]

    mixed = [talk({"x": 1}, ""), talk({"x": "one", "y": [1], "z": None}, "1")]
    as_text = [
        talk(json.dumps(each[1]["tool_calls"][0]["function"]["arguments"]), "1") for each in mixed
    ]
    as_text[0][2]["content"] = ""
    jsonl = rows_of(tmp_path / "train.jsonl", *mixed, golden="all")
    columns = ColumnsConfig(messages="messages", answer=None, golden="all")

    def read(path):
        rows = load_rows(SourceConfig(path=str(path), columns=columns))
        return [(row.messages, row.golden_turns) for row in rows]

    expected = [(row.messages, row.golden_turns) for row in jsonl]
    assert expected[0][1][1]["content"] == ""
    (tmp_path / "text").mkdir()
    rows_of(tmp_path / "text/train.jsonl", *as_text, golden="all")
    table = datasets.Dataset.from_dict({"messages": mixed}, on_mixed_types="use_json")
    for name in ("file", "folder"):
        (tmp_path / name).mkdir()
        table.to_parquet(tmp_path / name / "train.parquet")
    table.save_to_disk(tmp_path / "saved")
    strings = pyarrow.table({"messages": [json.dumps(each) for each in mixed]})
    pyarrow.parquet.write_table(strings, tmp_path / "strings.parquet")
    structs = pyarrow.table({"messages": [talk({"x": 1}, ""), talk({"x": 2, "y": [1]}, "1")]})
    pyarrow.parquet.write_table(structs, tmp_path / "structs.parquet")
    for place in ("text/train.jsonl", "file/train.parquet", "folder", "saved", "strings.parquet"):
        found = read(tmp_path / place)
        if place == "text/train.jsonl":  # a null in a text is as it was written
            found[1][1][0]["tool_calls"][0]["function"]["arguments"].pop("z", None)
        assert found == expected, place
    arguments = [
        turns[0]["tool_calls"][0]["function"]["arguments"]
        for _, turns in read(tmp_path / "structs.parquet")
    ]
    assert arguments == [{"x": 1}, {"x": 2, "y": [1]}]
