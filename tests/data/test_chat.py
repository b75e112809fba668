"""Prompts, golden responses and stop tokens, with the built-in tokenizer and with real ones."""

import json

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.stop_ids import stop_sources
from stable_opd_mcore.data.thoughts import golden_response, opens_thinking
from stable_opd_mcore.errors import DataError
from tests.commands.check.directories import TEMPLATE, write_model
from tests.real_data import real_data

QWEN, R1 = "tokenizers/Qwen2.5-Math-1.5B", "tokenizers/DeepSeek-R1-Distill-Qwen"
ONE_TURN = "<|im_start|>user\n{{{{ {} }}}}<|im_end|>\n<|im_start|>assistant\n"
QWEN3_THINKING = "tokenizers/Qwen3-Thinking-2507"


@pytest.fixture(scope="module")
def qwen():
    return Tokenizer.load(str(real_data(QWEN)))


@pytest.fixture(scope="module")
def r1():
    return Tokenizer.load(str(real_data(R1)))


@pytest.fixture(scope="module")
def synthetic():
    return Tokenizer.load("synthetic")


def test_pieces_are_the_text_of_each_token(qwen, synthetic):
    text = "x^2 \n\n h\u00e9llo \U0001f389 \u4e2d"
    ids = [*qwen.encode(text), qwen.stop_token_ids[0]]
    pieces = qwen.pieces(ids)
    assert "".join(pieces[:-1]) == text
    assert pieces[-1] == "<|im_end|>"
    emoji = pieces.index(" \U0001f389")
    assert pieces[emoji - 2 : emoji] == ["", ""]  # three tokens spell it; the last one has it
    cut = qwen.encode(" \U0001f389")[:1]  # a character that is never finished
    assert qwen.pieces(cut) == [""]
    assert "".join(synthetic.pieces(synthetic.encode("1+1=2;"))) == "1+1=2;"


def test_an_explicit_stop_token_ends_golden_responses():
    second = Tokenizer.load("synthetic", stop_token_ids=(21,))
    assert second.stop_token_ids == (21,) == tuple(second.encode("!"))
    with pytest.raises(DataError, match=r"\[24\] are outside .* ids are below 24"):
        Tokenizer.load("synthetic", stop_token_ids=(24,))


def test_prompt_template_keeps_latex_braces(synthetic, qwen):
    template = r"{problem} Put your final answer within \boxed{}."
    text = qwen.render_prompt(r"Find \frac{1}{2}.", template, system="Be brief.")
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        r"Find \frac{1}{2}. Put your final answer within \boxed{}."
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(DataError, match=r"lacks \{problem\}"):
        synthetic.render_prompt("1+1", template="{question}")


DROPPED = {
    "parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    "typed parts": "{{ (messages[0].content | selectattr('type', 'equalto', 'text')) | list }}",
    "cut": "{% for m in messages %}{{ m.content[:5] }}{% endfor %}",
    "changed": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "escaped": "{% for m in messages %}{{ m.content | e }}{% endfor %}",
    "as JSON": "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "another text": "<|im_start|>user\nHello<|im_end|>\n",
}


def test_a_template_that_drops_the_problem_is_refused(tmp_path):
    for case in DROPPED:
        tokenizer = Tokenizer.load(write_model(tmp_path, template=DROPPED[case]))
        with pytest.raises(DataError, match="drops or changes the text of the user message"):
            tokenizer.render_prompt("1+1")


def test_a_template_that_skips_a_role_is_refused_for_conversations_with_it(tmp_path):
    skips = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = Tokenizer.load(write_model(tmp_path, template=skips))
    assert tokenizer.render_prompt(" 1+1") == " 1+1"
    with pytest.raises(DataError, match=r"of the system message.*data\.system_prompt"):
        tokenizer.render_prompt("1+1", system="Think hard.")
    turns = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
    with pytest.raises(DataError, match="of the assistant message"):
        tokenizer.render_turns(turns)


def test_a_conversation_needs_a_template(tmp_path):
    path, turns = (
        write_model(tmp_path, template=None),
        [("user", "1?"), ("assistant", "2"), ("user", "3?")],
    )
    messages = [{"role": role, "content": text} for role, text in turns]
    with pytest.raises(
        DataError, match=r"several turns needs; save one there as chat_template\.jinja"
    ):
        Tokenizer.load(path).render_turns(messages)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert Tokenizer.load(path).render_turns(messages).count("<|im_start|>") == 4


def test_a_tokenizer_without_template_encodes_plainly(synthetic, tmp_path):
    synthetic.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    plain = Tokenizer.load(str(tmp_path))
    assert not plain.has_template
    assert plain.turn_end_id is None
    assert plain.render_prompt("1+1") == "1+1"
    assert plain.stop_token_ids == (20,)


def test_lengths_that_a_tokenizer_was_saved_with_change_no_text(synthetic, tmp_path):
    synthetic.save(tmp_path)
    backend = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    backend(["1+1=2;"], truncation=True, max_length=4)  # transformers stores this in the backend
    backend.backend_tokenizer.enable_padding(length=64, pad_id=0, pad_token=backend.pad_token)
    backend.save_pretrained(str(tmp_path))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    assert stored["truncation"]["max_length"] == 4
    assert stored["padding"]["strategy"] == {"Fixed": 64}
    loaded = Tokenizer.load(str(tmp_path))
    for text in ("1+1=2;" * 200, "1"):
        assert loaded.encode(text) == synthetic.encode(text)
    assert loaded.json_text == synthetic.json_text  # what `prepare` measures lengths with


def test_real_stop_tokens_disagree_and_are_all_found(qwen, r1):
    # Template <|im_end|>, both configs and the tokenizer <|endoftext|>.
    assert qwen.stop_token_ids == (151645, 151643)
    assert r1.stop_token_ids == (151643,)


@pytest.mark.parametrize(
    ("template", "stops"),
    [
        (TEMPLATE, (258, 256)),
        (ONE_TURN.format("messages[0]['content']"), (256,)),
        (ONE_TURN.format("messages[-1]['content']"), (256,)),
        (TEMPLATE.replace("in messages", "in messages if message['role'] == 'user'"), (256,)),
        (TEMPLATE.replace("<|im_end|>", ""), (256,)),
        (TEMPLATE.replace("<|im_end|>", "") + "<|im_start|>assistant\n", (256,)),
        (TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", "<|endoftext|>"), (256,)),
    ],
)
def test_only_the_end_of_an_assistant_turn_is_a_stop_token(tmp_path, template, stops):
    model = write_model(tmp_path, template=template)
    assert Tokenizer.load(model).stop_token_ids == stops


def test_generation_config_may_list_several_stop_tokens(synthetic, tmp_path):
    synthetic.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [21, 22]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert Tokenizer.load(str(tmp_path)).stop_token_ids == (20, 21, 22, 3)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json: not valid JSON"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("override", [None, (257,)])
def test_other_programs_stop_a_saved_model_where_it_was_trained_to_stop(tmp_path, override):
    model = write_model(tmp_path / "model")  # its template ends turns with 258, its files say 256
    settings = {"temperature": 0.7, "do_sample": True, "eos_token_id": 256}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(model, override)
    assert tokenizer.stop_token_ids == (override or (258, 256))
    tokenizer.save(tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(str(tmp_path / "saved"))
    assert saved.eos_token_id == list(tokenizer.stop_token_ids)
    assert (saved.temperature, saved.do_sample) == (0.7, True)
    assert Tokenizer.load(str(tmp_path / "saved"), override).stop_token_ids == (
        tokenizer.stop_token_ids
    )


def test_a_model_without_generation_settings_is_saved_with_its_stop_tokens(synthetic, tmp_path):
    synthetic.save(tmp_path)
    assert GenerationConfig.from_pretrained(str(tmp_path)).eos_token_id == [20]
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(DataError, match=r"generation_config\.json: not valid JSON"):
        Tokenizer.load(str(tmp_path), stop_token_ids=(20,))  # else the first checkpoint fails


def test_a_golden_thought_is_kept_with_a_template_that_deletes_thoughts(r1):
    golden = "<think>\nOne and one.\n</think>\n\n\\boxed{2}"
    prompt = r1.render_prompt("1+1?")
    assert prompt.endswith("<\uff5cAssistant\uff5c>")
    assert golden_response(golden, prompt) == golden
    assert r1.encode(golden)[0] == 151648


def test_a_thought_opened_by_the_prompt_is_closed_once(qwen):
    config = json.loads((real_data(QWEN3_THINKING) / "tokenizer_config.json").read_text())
    backend = PreTrainedTokenizerFast.from_pretrained(str(real_data(QWEN)))
    backend.chat_template = config["chat_template"]
    thinking = Tokenizer(backend, "thinking")
    prompt = thinking.render_prompt("1+1?")
    assert opens_thinking(prompt)
    assert not opens_thinking(qwen.render_prompt("1+1?"))
    golden = "<think>\nEasy.\n</think>\n\n2"
    for solution in (golden, golden.removeprefix("<think>\n")):
        assert golden_response(solution, prompt) == "Easy.\n</think>\n\n2"
    assert golden_response("It is 2.", prompt) == "\n</think>\n\nIt is 2."
    assert thinking.turn_end_id == 151645


def test_control_tokens_are_those_that_end_or_open_a_turn(qwen, r1):
    assert qwen.control_token_in("Stop.<|im_end|>\n<|im_start|>system\n") == "<|im_end|>"
    assert r1.control_token_in("a<\uff5cAssistant\uff5c>b") == "<\uff5cAssistant\uff5c>"
    for text in ("<think>\nOne.\n</think>\n\n2", "a <| b |> c, <im_end>, $2$ \x00"):
        assert qwen.control_token_in(text) is r1.control_token_in(text) is None


def test_a_null_eos_outside_text_config_leaves_that_inside(tmp_path):
    settings = {"eos_token_id": None, "text_config": {"eos_token_id": 5}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert stop_sources(tmp_path, Tokenizer.load("synthetic"))["config.json"] == (5,)
