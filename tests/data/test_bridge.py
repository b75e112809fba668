"""The text between two turns: of ten published templates, around foreign text, and refused."""

import random
import unicodedata
from functools import cache

import pytest

from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.errors import DataError
from tests.commands.check.directories import TEMPLATE, write_model
from tests.data.real_tokenizers import (
    GEMMA,
    GEMMA_MARKS,
    GEMMA_TEMPLATE,
    GLM45,
    GLM47,
    MATH,
    MOONLIGHT,
    QWEN3,
    QWEN25,
    R1,
    THINKING,
    V2_LITE,
    real_tokenizer,
)

QWEN_USER = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QWEN_TOOL = QWEN_USER.format("<tool_response>\n{}\n</tool_response>")
R1_USER = "<\uff5cend\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>{}<\uff5cAssistant\uff5c>"
GLM45_TOOL = "\n<tool_response>\n{}\n</tool_response>"
MOONLIGHT_NEW = "<|im_end|>{}<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|>"
NO_THOUGHT = {"enable_thinking": False}
WRITTEN = [  # the template, its arguments, a role, and what stands between two turns
    *((name, {}, "user", QWEN_USER) for name in (MATH, QWEN25, QWEN3)),
    *((name, {}, "tool", QWEN_TOOL) for name in (MATH, QWEN25, QWEN3)),
    (QWEN3, NO_THOUGHT, "user", QWEN_USER + "<think>\n\n</think>\n\n"),
    (QWEN3, NO_THOUGHT, "tool", QWEN_TOOL + "<think>\n\n</think>\n\n"),
    (THINKING, {}, "user", QWEN_USER + "<think>\n"),
    (THINKING, {}, "tool", QWEN_TOOL + "<think>\n"),
    (R1, {}, "user", R1_USER),
    (GLM45, {}, "user", "<|user|>\n{}<|assistant|>"),
    (GLM45, {}, "tool", f"<|observation|>{GLM45_TOOL}<|assistant|>"),
    (GLM45, NO_THOUGHT, "user", "<|user|>\n{}/nothink<|assistant|>\n<think></think>"),
    (GLM47, {}, "user", "<|user|>{}<|assistant|><think>"),
    (GLM47, {}, "tool", "<|observation|><tool_response>{}</tool_response><|assistant|><think>"),
    (GLM47, NO_THOUGHT, "user", "<|user|>{}<|assistant|></think>"),
    (MOONLIGHT, {}, "user", MOONLIGHT_NEW.format("<|im_user|>user", "{}")),
    (MOONLIGHT, {}, "tool", MOONLIGHT_NEW.format("tool", "{}")),
    (V2_LITE, {}, "user", "<|endoftext|>User: {}\n\nAssistant:"),
]
KINDS = pytest.mark.parametrize(("name", "kwargs", "role", "written"), WRITTEN)
SYSTEM, ASK = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}
THOUGHTS = [
    {"role": "assistant", "content": f"<think>\nHm, {n}.\n</think>\n\nIt is {n}."} for n in (2, 3)
]


@cache
def control_tokens(tokenizer):
    names = {token: tokenizer.pieces([token])[0] for token in sorted(tokenizer.added_ids)}
    return {token: name for token, name in names.items() if tokenizer.control_token_in(name)}


def end_of(tokenizer, written):
    """The token with which the student ends a turn; in GLM's templates the next message begins with
    it."""
    return tokenizer.turn_end_id or tokenizer.encode(written)[0]


def control_ids(tokenizer, token_ids):
    return [token for token in token_ids if token in control_tokens(tokenizer)]


@KINDS
def test_a_bridge_is_what_the_template_writes_less_what_was_sampled(name, kwargs, role, written):
    tokenizer = real_tokenizer(name, **kwargs)
    bridge, new = Bridge(tokenizer), {"role": role, "content": " It is 3.\n"}
    whole = tuple(tokenizer.encode(written.format(" It is 3.\n")))
    other_stop, cut = 151647 if name in (R1, V2_LITE) else 151643, tokenizer.encode("so")[0]
    sampled_end = bridge.append([new], end_of(tokenizer, written))
    assert sampled_end.token_ids == whole[1:]
    for last in (other_stop, cut):
        observed = bridge.append([new], last)
        assert observed.token_ids == whole
        assert not observed.restarts
    two = bridge.append([new, new], end_of(tokenizer, written))
    assert two.text.count(" It is 3.\n") == 2
    assert bridge.refusal(role) is None


@KINDS
def test_only_the_assistants_text_differs_from_the_templates_own_history(
    name, kwargs, role, written
):
    tokenizer = real_tokenizer(name, **kwargs)
    bridge = Bridge(tokenizer)
    for system in ([], [SYSTEM]):
        history = [*system, ASK]
        context = tokenizer.encode(tokenizer.render_turns(history))
        for number, turn in enumerate(THOUGHTS):
            said = [*tokenizer.encode(turn["content"]), end_of(tokenizer, written)]
            new = [{"role": role, "content": f"So {number}?"}] * (1 + number * (role == "tool"))
            observed = bridge.append(new, said[-1])
            context += [*said, *observed.token_ids]
            history += [turn, *new]
            text = tokenizer.render_turns(history)
            assert text.rpartition(turn["content"][-8:])[2] == observed.text
            assert control_ids(tokenizer, tokenizer.encode(text)) == control_ids(tokenizer, context)


@pytest.mark.parametrize(
    ("name", "kwargs", "thought", "extends"),
    [
        (MATH, {}, True, True),
        (QWEN25, {}, True, True),
        (QWEN3, {}, True, False),
        (QWEN3, {}, False, True),
        (QWEN3, NO_THOUGHT, False, False),
        (THINKING, {}, False, False),
        (R1, {}, True, False),
        (R1, {}, False, True),
    ],
)
def test_a_rendered_history_extends_the_context_or_starts_anew(name, kwargs, thought, extends):
    tokenizer = real_tokenizer(name, **kwargs)
    bridge, new = Bridge(tokenizer), {"role": "user", "content": "So?"}
    turn = THOUGHTS[0] if thought else {"role": "assistant", "content": "It is 2."}
    prompt = tokenizer.encode(tokenizer.render_turns([ASK]))
    said = [*tokenizer.encode(turn["content"]), tokenizer.turn_end_id]
    observed = bridge.render([ASK, turn, new], prompt + said)
    assert observed.restarts is not extends
    if extends:
        assert observed.token_ids == bridge.append([new], said[-1]).token_ids
    else:
        whole = tokenizer.encode(tokenizer.render_turns([ASK, turn, new]))
        assert observed.token_ids == tuple(whole)
    truncated = bridge.render([ASK, turn, new], prompt + said[:-1])
    assert truncated.restarts is not extends  # the end of the turn is observed then
    assert bridge.render([ASK, turn, new], [*prompt, *said[:-1], 9]).restarts


OF_USERS = [(name, kwargs, written) for name, kwargs, role, written in WRITTEN if role == "user"]


@pytest.mark.parametrize(("name", "kwargs", "written"), OF_USERS)
def test_a_long_episode_reads_all_that_was_sampled_or_the_templates_history(name, kwargs, written):
    for thought in ["", "<think>\nHm.\n</think>\n\n"]:
        for stop in ["turn_end_id", "eos_token_id", None]:
            tokenizer = real_tokenizer(name, **kwargs)
            bridge, history = Bridge(tokenizer), [ASK]
            text = tokenizer.render_turns(history)
            appended = rendered = tokenizer.encode(text)
            stop_ids = [getattr(tokenizer, stop) or end_of(tokenizer, written)] if stop else []
            for number in range(3):
                said = f"{thought}It is {number}."
                sampled = [*tokenizer.encode(said), *stop_ids]
                new = {"role": "user", "content": f"So {number}?"}
                history += [{"role": "assistant", "content": said}, new]
                appended = [*appended, *sampled, *bridge.append([new], sampled[-1]).token_ids]
                is_end = stop_ids == [end_of(tokenizer, written)]
                text += said + ("" if is_end else "".join(tokenizer.pieces(stop_ids)))
                text += written.format(new["content"])
                assert "".join(tokenizer.pieces(appended)) == text
                seen = bridge.render(history, [*rendered, *sampled])
                rendered = [*([] if seen.restarts else [*rendered, *sampled]), *seen.token_ids]
                assert rendered == tokenizer.encode(tokenizer.render_turns(history))
                if not seen.restarts and not number:
                    assert rendered == appended


def test_tools_are_rendered_and_repeated_where_the_template_repeats_them(tmp_path):
    """Mistral's writes them before the last message of the user, Qwen's at the start."""
    again = "{% if tools and loop.last %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    template = TEMPLATE.replace("<|im_start|>{{", f"{again}<|im_start|>{{{{")
    late, early = Tokenizer.load(write_model(tmp_path, template=template)), real_tokenizer(QWEN25)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    turns = [ASK, {"role": "assistant", "content": "2"}, {"role": "user", "content": "So?"}]
    for tokenizer, num_after in ((late, 1), (early, 0)):
        bridge = Bridge(tokenizer)
        observed = bridge.append(turns[2:], tokenizer.turn_end_id, [tool])
        assert observed.text.count('"name": "add"') == num_after
        whole = bridge.render(turns, (), [tool])
        assert whole.text == tokenizer.render_turns(turns, tools=[tool])
        assert whole.text.count('"name": "add"') == 1
        assert '"add"' not in bridge.render(turns, ()).text


@KINDS
def test_foreign_text_never_ends_its_message(name, kwargs, role, written):
    tokenizer = real_tokenizer(name, **kwargs)
    bridge, generator = Bridge(tokenizer), random.Random(name + role)
    names = list(control_tokens(tokenizer).values())
    pieces = [*names, "<", "|>", "\uff5c", " ", "\n", "\n\n", "7", "It", "\u00e9", "e\u0301"]
    pieces += ["\U0001f389", "\x00", "text-of-the-turn", "</think>", "{{ 1 }}", "\ud800"]
    before = tokenizer.render_turns([ASK]) + "It is 2."
    expected = control_ids(tokenizer, tokenizer.encode(written.format("x")))
    for _ in range(150):
        text = "".join(generator.choices(pieces, k=generator.randrange(1, 9)))
        messages = [{"role": role, "content": text}]
        observed, (_, num_neutralised) = bridge.append(messages, 0), bridge.neutralised(messages)
        assert control_ids(tokenizer, observed.token_ids) == expected
        assert num_neutralised >= sum(map(text.count, names))
        assert bool(num_neutralised) is bool(tokenizer.control_token_in(text))
        # Encoded together with the text before it, it has the same tokens.
        joined = tokenizer.encode(before + observed.text)
        assert joined == [*tokenizer.encode(before), *observed.token_ids]
        read = "".join(tokenizer.pieces(observed.token_ids))
        assert read == unicodedata.normalize("NFC", observed.text)
        if not num_neutralised:
            assert observed.text == written.format(text.replace("\ud800", "?"))
    clean = {"role": role, "content": names[0][:1] + " " + names[0][1:]}
    hostile = {"role": role, "content": names[0]}
    assert bridge.append([hostile], 0).token_ids == bridge.append([clean], 0).token_ids
    messages = [{"role": "user", "content": names[0]}]
    assert bridge.neutralised(messages)[1] == 1
    rendered = bridge.render(messages, [])
    assert rendered.token_ids == bridge.render(bridge.neutralised(messages)[0], []).token_ids
    assert not rendered.restarts


@pytest.mark.parametrize(
    ("name", "reason"),
    [(R1, "depends on the turns"), (GEMMA, "must alternate"), (V2_LITE, "does not write it")],
)
def test_a_tool_message_that_the_template_does_not_take_is_refused_by_name(name, reason):
    bridge = Bridge(real_tokenizer(name))
    tool = {"role": "tool", "content": "4"}
    with pytest.raises(DataError, match=rf"{name}.*a tool message cannot follow .*{reason}"):
        bridge.append([tool], 1)
    assert "make it a user message" in bridge.refusal("tool")
    assert "only user and tool messages can" in bridge.refusal("system")


def test_gemmas_template_trims_messages_and_takes_one_user_message_at_a_time():
    tokenizer = real_tokenizer(GEMMA)
    bridge, new = Bridge(tokenizer), {"role": "user", "content": " So?\n"}
    written = "<end_of_turn>\n<start_of_turn>user\nSo?<end_of_turn>\n<start_of_turn>model\n"
    whole = tuple(tokenizer.encode(written))
    history = [SYSTEM, ASK]
    context = tokenizer.encode(tokenizer.render_turns(history))
    for turn in THOUGHTS:  # which it leaves in earlier turns
        said = [*tokenizer.encode(turn["content"]), whole[0]]
        observed = bridge.append([new], said[-1])
        history += [turn, new]
        seen = bridge.render(history, [*context, *said])
        assert seen.token_ids == observed.token_ids == whole[1:]
        assert not seen.restarts
        assert bridge.append([new], 151643).token_ids == whole
        context += [*said, *observed.token_ids]
    with pytest.raises(DataError, match="Conversation roles must alternate"):
        bridge.append([new, new], whole[0])


def raising(condition):
    return TEMPLATE.replace("{% for", f"{{{{ raise_exception('No!') if {condition} }}}}{{% for", 1)


@pytest.mark.parametrize("kept", ["false", "message == messages[-1]"])
def test_a_template_that_leaves_out_messages_is_refused(tmp_path, kept):
    only = f"messages if message.role != 'tool' or {kept} %}}"
    template = TEMPLATE.replace("messages %}", only)
    bridge = Bridge(Tokenizer.load(write_model(tmp_path, template=template)))
    tools = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    conversation = [ASK, {"role": "assistant", "content": "2+2"}, *tools]
    with pytest.raises(DataError, match=r"leaves out a tool .*assistant, tool, tool; make it a us"):
        bridge.render(conversation, [])
    with pytest.raises(DataError, match=r"tool message .*; make it a user message"):
        bridge.append(tools, 0)
    users = [{**tool, "role": "user"} for tool in tools]
    bridge.render([*conversation[:2], *users], [])
    bridge.append(users, 0)


@pytest.mark.parametrize(
    ("template", "role", "reason"),
    [
        (TEMPLATE, "user", None),
        (TEMPLATE, "tool", None),
        (GEMMA_TEMPLATE, "user", None),
        (GEMMA_TEMPLATE, "tool", "roles must alternate"),
        (TEMPLATE.replace("<|im_end|>\n", ""), "user", None),
        (TEMPLATE.replace("{% endif", "{% else %}<|endoftext|>{% endif"), "user", None),
        (raising("messages[0].role == 'system'"), "user", None),
        (raising("messages[-1].role == 'tool'"), "tool", "No!"),
        (None, "user", "there is no chat template; save another chat template there"),
        (TEMPLATE.replace("<|im_end|>", ""), "user", None),
        (TEMPLATE.replace("<|im_end|>", "."), "user", "no token of its own begins"),
        (
            TEMPLATE.replace("messages %}", "messages if message.role != 'tool' %}"),
            "tool",
            "not wr",
        ),
        (
            TEMPLATE.replace("message['content']", "message['content'][-9:]"),
            "user",
            "write the ass",
        ),
        (TEMPLATE.replace("['role'] }}", "['role'] }}{{ loop.index }}"), "user", "depends on"),
        (
            TEMPLATE.replace("{% if ", "{% if messages[-1].role == 'user' and "),
            "tool",
            "with a gen",
        ),
    ],
)
def test_a_template_that_has_no_bridge_is_refused_with_the_reason(tmp_path, template, role, reason):
    path = write_model(tmp_path, template=template, added=GEMMA_MARKS)
    tokenizer = Tokenizer.load(path)
    bridge = Bridge(tokenizer)
    found = bridge.refusal(role)
    assert found is None if reason is None else reason in found
    if found and found.endswith("make it a user message"):
        bridge.append([ASK], tokenizer.turn_end_id)
    elif found:
        assert found.endswith("save another chat template there")
        other = Tokenizer.load(write_model(tmp_path, template=TEMPLATE))
        Bridge(other).append([ASK], other.turn_end_id)


def test_a_template_that_cannot_append_a_message_is_no_other_than_itself(tmp_path):
    """`render` writes the message, with history=template."""
    numbered = TEMPLATE.replace("['role'] }}", "['role'] }}{{ loop.index }}")
    bridge = Bridge(Tokenizer.load(write_model(tmp_path / "numbered", template=numbered)))
    plain = Bridge(Tokenizer.load(write_model(tmp_path / "plain", template=TEMPLATE)))
    assert "depends on" in bridge.refusal("user")
    assert bridge.difference(bridge, "user") is None
    own, other = bridge.difference(plain, "user")
    assert (own, other) == (repr(bridge.between("user")), repr(plain.between("user")))
    assert "depends on" in plain.difference(bridge, "user")[1]


def test_white_space_before_the_end_of_a_turn_is_not_repeated(tmp_path):
    template = TEMPLATE.replace("<|im_end|>", "\n<|im_end|>")
    tokenizer = Tokenizer.load(write_model(tmp_path, template=template))
    bridge, end = Bridge(tokenizer), tokenizer.turn_end_id
    after = "\n<|im_start|>user\nSo?\n<|im_end|>\n<|im_start|>assistant\n"
    for last, text in ((end, after), (65, "\n<|im_end|>" + after)):
        observed = bridge.append([{"role": "user", "content": "So?"}], last)
        assert list(observed.token_ids) == tokenizer.encode(text)


@pytest.mark.parametrize("name", [MATH, QWEN25, QWEN3, THINKING])
def test_tool_calls_are_the_templates_text(name):
    bridge = Bridge(real_tokenizer(name))
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}}
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "\u00e9"}}\n</tool_call>'
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert bridge.turns.said(turn) == written
    assert bridge.turns.said({**turn, "content": "I add."}) == f"I add.\n{written}"
    assert bridge.turns.said({**turn, "tool_calls": [call, call]}) == f"{written}\n{written}"
    whole = real_tokenizer(name).render([ASK, turn])
    assert whole.endswith(f"{written}<|im_end|>\n")


@pytest.mark.parametrize("name", [GEMMA, MOONLIGHT, V2_LITE])
def test_tool_calls_that_a_template_drops_are_refused(name):
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    turn = {"role": "assistant", "content": "I add.", "tool_calls": [call]}
    with pytest.raises(DataError, match=f"{name}.*not write tool calls after a text; write them"):
        Bridge(real_tokenizer(name)).turns.said(turn)


@pytest.mark.parametrize("has_filter", [True, False])
def test_tool_calls_that_a_template_writes_as_python_are_refused(tmp_path, has_filter):
    written = "c.function.arguments" + " | tojson" * has_filter
    calls = "{% for c in message.tool_calls or [] %}{{ " + written + " }}{% endfor %}"
    template = TEMPLATE.replace("<|im_end|>", f"{calls}<|im_end|>")
    bridge = Bridge(Tokenizer.load(write_model(tmp_path, template=template)))
    call = {"function": {"name": "add", "arguments": {"a": "x", "b": True}}}
    turn = {"role": "assistant", "content": "I add. ", "tool_calls": [call]}
    if has_filter:
        assert bridge.turns.said(turn) == 'I add. {"a": "x", "b": true}'
        return
    with pytest.raises(DataError, match=r"'b': True\}; expected JSON: .*calls into the content of"):
        bridge.turns.said(turn)
    as_text = {"role": "assistant", "content": 'I add. {"a": "x"}'}
    assert bridge.turns.said(as_text) == as_text["content"]


@pytest.mark.parametrize("name", [MATH, QWEN25, QWEN3, THINKING, R1])
def test_long_observations_lose_their_middle(name):
    tokenizer, generator = real_tokenizer(name), random.Random(name)
    bridge = Bridge(tokenizer)
    pieces = [*control_tokens(tokenizer).values(), "<|im_", "end|>", "\U0001f389", "\u00e9"]
    pieces += [" ", "\n", "It is", "7", "door", "\u5b57"]
    for _ in range(150):
        texts = ["".join(generator.choices(pieces, k=generator.randrange(90))) for _ in range(3)]
        messages, _ = bridge.neutralised([{"role": "user", "content": text} for text in texts])
        limit = generator.randrange(40, 200)
        shorter, num_cut = bridge.shortened(messages, limit)
        before, after = (
            [len(tokenizer.encode(message["content"])) for message in each]
            for each in (messages, shorter)
        )
        if sum(before) <= limit:
            assert (shorter, num_cut) == (messages, 0)
            continue
        assert sum(after) <= limit
        assert num_cut > 0
        for old, new, was, now in zip(messages, shorter, before, after, strict=True):
            assert tokenizer.control_token_in(new["content"]) is None
            if new != old:
                head, mark, tail = new["content"].partition("\n[...]\n")
                assert mark
                assert old["content"].startswith(head)
                assert old["content"].endswith(tail)
                assert now < was
        cut = [new != old for old, new in zip(messages, shorter, strict=True)]
        lengths = [[n for n, c in zip(before, cut, strict=True) if c == one] for one in (0, 1)]
        assert max(lengths[0], default=0) < min(lengths[1])  # only the longest ones


def test_many_short_messages_are_cut_without_a_mark():
    bridge = Bridge(real_tokenizer(QWEN25))
    messages = [{"role": "tool", "content": "one two three four"}] * 8
    shorter, num_cut = bridge.shortened(messages, 16)
    assert {message["content"] for message in shorter} == {"one four"}
    assert num_cut == 16
