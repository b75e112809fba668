"""Tool calls of eight families, whole, cut and damaged: nothing that the student said is lost."""

import json
import random
import re
import time

import pytest

from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.chat_api import ChatReply, same_message
from stable_opd_mcore.data.openai_api import Form, completion
from stable_opd_mcore.data.request_parts import read_messages
from stable_opd_mcore.data.tool_calls import ToolCalls
from stable_opd_mcore.data.written_turns import WrittenTurns
from tests.commands.check.directories import TEMPLATE, write_model
from tests.data.real_tokenizers import GLM45_TEMPLATE, GLM47_TEMPLATE, GLM_MARKS
from tests.data.test_message_form import HARMONY

OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function|tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}" + OPENED
)
QWEN3_5 = QWEN.replace(
    "{{ c.function|tojson }}",
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments|items %}"
    "<parameter={{ k }}>\n{{ v if v is string else v|tojson }}\n</parameter>\n{% endfor %}"
    "</function>",
)
LLAMA = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{% if m.tool_calls %}"
    "{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments|tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments|tojson }}{% endfor %}<|im_end|>{% endif %}{% endfor %}"
)
MISTRAL_LIST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
    "{{ m.content or '' }}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id|length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    '{"name": {{ c.function.name|tojson }}, "arguments": {{ c.function.arguments|tojson }}, '
    '"id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{% endif %}<|im_end|>'
    "{% endif %}{% endfor %}"
)
MARKS = (
    *("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|constrain|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", *GLM_MARKS),
)
ADD = {"name": "w1_add", "arguments": {"a": "w2", "b": ["w3", {"c": 4}]}}
TOOL = {"type": "function", "function": {"name": "w1_add", "parameters": {"properties": {}}}}
XML_ARGUMENTS = {"a": "  w2\n\n  w3", "b": 4}
SCHEMA = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
XML_TOOL = {"type": "function", "function": {"name": "w1_add", "parameters": SCHEMA}}
XML_CALLS = [{"name": "w1_add", "arguments": XML_ARGUMENTS}, {"name": "w7", "arguments": {}}]
FAMILIES = {  # template, text before calls, what one call is, tool
    "qwen": (QWEN, "w4 w5.", [ADD, {**ADD, "arguments": {"a": "w6"}}], TOOL),
    "qwen3_5": (QWEN3_5, "w4 w5.", XML_CALLS, XML_TOOL),
    "glm4_5": (GLM45_TEMPLATE, "w4 w5.", XML_CALLS, XML_TOOL),
    "glm4_7": (GLM47_TEMPLATE, "w4 w5.", XML_CALLS, XML_TOOL),
    "llama": (LLAMA, "", [ADD], TOOL),
    "mistral": (MISTRAL, "w4", [ADD, {"name": "w7", "arguments": {"x": "w8"}}], TOOL),
    "mistral_list": (MISTRAL_LIST, "w4", [ADD, {"name": "w7", "arguments": {"x": "w8"}}], TOOL),
    "gpt_oss": (HARMONY, "", [ADD], TOOL),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    template, content, functions, tool = FAMILIES[request.param]
    path = write_model(tmp_path_factory.mktemp("m"), template=template, added=MARKS)
    tokenizer = Tokenizer.load(path, [257])
    calls = [
        {"id": f"{n:09}", "type": "function", "function": each} for n, each in enumerate(functions)
    ]
    message = {"role": "assistant", "content": content or None, "tool_calls": calls}
    return tokenizer, ToolCalls(tokenizer), message, [tool, {**tool, "function": {"name": "w7"}}]


def echoed(parsed):
    """The message that a client of OpenAI's API sends with its next request."""
    reply = ChatReply(parsed.content, parsed.reasoning, parsed.calls)
    body = json.loads(json.dumps(completion(reply, Form(), "1")))
    (message,), _ = read_messages([body["choices"][0]["message"]])
    assert same_message(message, reply.message)
    return message


def test_what_a_chat_template_writes_is_read_and_written_again(family):
    tokenizer, calls, message, tools = family
    text = WrittenTurns(tokenizer).said(message)
    parsed = calls.parse(text, tools, was_cut=False)
    assert not parsed.is_damaged
    assert same_message(echoed(parsed), message)
    assert re.sub(r"[\w]{9}\"}", "", WrittenTurns(tokenizer).said(echoed(parsed))) == re.sub(
        r"[\w]{9}\"}", "", text
    )
    assert len({call.call_id for call in parsed.calls}) == len(parsed.calls)
    assert calls.parse(text, tools, was_cut=False, seed="2").calls[0] != parsed.calls[0]


def test_a_cut_turn_and_one_without_tools_have_no_calls(family):
    tokenizer, calls, message, tools = family
    text = WrittenTurns(tokenizer).said(message)
    for parsed in (calls.parse(text, tools, was_cut=True), calls.parse(text, (), was_cut=False)):
        assert (parsed.content, parsed.calls) == (text, ())
    assert calls.parse(text, tools, was_cut=True).is_damaged
    for plain in ("w1 w2", "", '{"answer": 3}'):
        assert calls.parse(plain, tools, was_cut=False).content == plain
        assert not calls.parse(plain, tools, was_cut=False).is_damaged


def test_damaged_calls_lose_no_word_and_are_equal_when_they_come_back(family):
    tokenizer, calls, message, tools = family
    text, chance = WrittenTurns(tokenizer).said(message), random.Random(0)
    marks = [mark for mark in MARKS if mark in text or "channel" not in mark]
    pieces = [*marks, *re.findall(r"<[^>]*>|w\d|.", text, re.DOTALL), " ", "\n", "w9", "\ud800"]
    num_damaged = 0
    for _ in range(200):
        damaged = text
        for _ in range(chance.randint(1, 3)):
            start = chance.randrange(len(damaged) + 1)
            end = chance.choice((start, start + 1, start + chance.randint(0, 30), len(damaged)))
            damaged = damaged[:start] + chance.choice(("", *pieces)) + damaged[end:]
        parsed = calls.parse(damaged, tools, was_cut=False)
        num_damaged += parsed.is_damaged
        told = parsed.content + parsed.reasoning
        for call in parsed.calls:
            told += call.name + json.dumps(dict(call.arguments))
        assert sorted(re.findall(r"w\d", told)) == sorted(re.findall(r"w\d", damaged)), damaged
        if parsed.is_damaged:
            assert parsed.calls == ()
        echoed(parsed)
    assert num_damaged > 20


def test_a_student_that_repeats_itself_is_read_in_time(family):
    tokenizer, calls, message, tools = family
    text = WrittenTurns(tokenizer).said(message)
    pieces = {*re.findall(r"<[^>]*>\n?|\[[A-Z_]+\]|{.*?:", text), " ", "\n", "a", "to=functions."}
    for piece in sorted(pieces):
        for before in ("", text[: text.index("a")], text[:-1]):
            start = time.process_time()
            calls.parse(before + piece * 4000, tools, was_cut=False)
            assert time.process_time() - start < 2, (before, piece)


def test_channels_are_told_apart(tmp_path):
    tokenizer = Tokenizer.load(write_model(tmp_path, template=HARMONY, added=MARKS), [257])
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    told = "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
    call = (
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"x": 1}'
    )
    for said in (call, call.replace("commentary", "analysis")):  # it calls in both
        parsed = ToolCalls(tokenizer).parse(thought + told + thought + said, [TOOL], was_cut=False)
        assert (parsed.content, parsed.reasoning) == ("Wait.", "Hm.Hm.")
        assert [(each.name, each.arguments) for each in parsed.calls] == [("f", {"x": 1})]
    final = f"{thought}<|start|>assistant<|channel|>final<|message|>2"
    for tools in ((), [TOOL]):
        parsed = ToolCalls(tokenizer).parse(final, tools, was_cut=False)
        assert (parsed.content, parsed.reasoning, parsed.is_damaged) == ("2", "Hm.", False)


@pytest.mark.parametrize("between", ["; ", ";", "\n", " ;\n<|python_tag|>"])
def test_several_calls_are_read_also_where_the_template_writes_one(tmp_path, between):
    """Llama 3 says several calls in one turn (vllm-project/vllm #11592)."""
    tokenizer = Tokenizer.load(write_model(tmp_path, template=LLAMA, added=MARKS), [257])
    texts = [f'{{"name": "{name}", "parameters": {{"x": ["}};", {{"y": 1}}]}}}}' for name in "fgh"]
    parsed = ToolCalls(tokenizer).parse(between.join(texts), [TOOL], was_cut=False)
    assert [(call.name, call.arguments) for call in parsed.calls] == [
        (name, {"x": ["};", {"y": 1}]}) for name in "fgh"
    ]
    assert parsed.content == ""
    replies = [{"role": "tool", "content": each} for each in ("2", "3")]
    seen = Bridge(tokenizer).append(replies, 257, said=echoed(parsed))
    written = "".join(f"<|start|>tool<|message|>{each}<|im_end|>" for each in "23")
    assert seen.text == f"<|im_end|>{written}<|start|>assistant<|message|>"
    told = ToolCalls(tokenizer).parse(f"{texts[0]}{between}and more", [TOOL], was_cut=False)
    assert (told.calls, told.is_damaged) == ((), True)


def test_thoughts_are_apart(tmp_path):
    tokenizer = Tokenizer.load(write_model(tmp_path, template=QWEN, added=MARKS), [257])
    calls = ToolCalls(tokenizer)
    said = 'Hm.\n</think>\n\nSo:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n!'
    parsed = calls.parse(said, [TOOL], was_cut=False, in_thought=True)
    assert (parsed.reasoning, parsed.content) == ("Hm.", "So:\n\n!")
    assert [call.name for call in parsed.calls] == ["f"]
    assert calls.parse("Hm.", [TOOL], False, in_thought=True).reasoning == "Hm."
    broken = calls.parse(said.replace("{}", "{"), [TOOL], was_cut=False)
    assert broken.content.startswith("So:\n<tool_call>")
    assert (broken.reasoning, broken.is_damaged) == ("Hm.", True)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": 1, "x": 2}}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {"x": ' + "[" * 10**5,
    ],
)
def test_what_is_no_call_is_text(tmp_path, call):
    tokenizer = Tokenizer.load(write_model(tmp_path, template=QWEN, added=MARKS), [257])
    said = f"<tool_call>\n{call}\n</tool_call>"
    parsed = ToolCalls(tokenizer).parse(said, [TOOL], was_cut=False)
    assert (parsed.content, parsed.calls, parsed.is_damaged) == (said, (), True)


def test_a_tokenizers_own_template_is_used_and_another_form_is_refused(tmp_path):
    form = QWEN.replace("<tool_call>", "<<").replace("</tool_call>", ">>")
    path = write_model(tmp_path, template=form)
    assert "save a response_template in its tokenizer_config.json" in (
        ToolCalls(Tokenizer.load(path)).refusal() or ""
    )
    transform = {"type": "function", "function": "{content}"}
    calls = {
        "open": "<<",
        "close": ">>",
        "repeats": True,
        "content": "json",
        "transform": transform,
    }
    own = {"start_anchor": "assistant\n", "fields": {"tool_calls": calls, "content": {}}}
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"response_template": own}))
    reader = ToolCalls(Tokenizer.load(path))
    assert reader.refusal() is None
    said = 'w1 <<{"name": "f", "arguments": {"x": 1}}>>'
    assert reader.parse(said, [TOOL], was_cut=False).calls[0].arguments == {"x": 1}
    plain = ToolCalls(Tokenizer.load(write_model(tmp_path / "plain", template=TEMPLATE)))
    assert plain.refusal()
    assert plain.parse(said, [TOOL], was_cut=False).content == said
