"""The built-in tokenizer, and directories whose tokenizer files are broken or contradict others."""

import json
from pathlib import Path

import pytest

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.models.files.small_files import copy_tokenizer
from tests.commands.check.directories import TEMPLATE, write_model


@pytest.fixture(scope="module")
def synthetic():
    return Tokenizer.load("synthetic")


def test_synthetic_round_trip(synthetic):
    assert synthetic.vocab_size == 24
    assert synthetic.decode(synthetic.encode(synthetic.render_prompt("2+1-3"))) == "2+1-3#"
    response = [*synthetic.encode("2+1=3;3-3=0;[0]"), synthetic.stop_token_ids[0]]
    assert synthetic.decode(response) == "2+1=3;3-3=0;[0]"
    # A stop in the middle, a second stop and padding stay visible.
    assert synthetic.decode(synthetic.encode("1$2!.3$")) == "1$2!.3"


def test_synthetic_saved_and_loaded_is_the_same(synthetic, tmp_path):
    synthetic.save(tmp_path)
    loaded = Tokenizer.load(str(tmp_path))
    assert loaded.render_prompt("4*3") == synthetic.render_prompt("4*3")
    assert loaded.decode(loaded.encode("w4*3=2;[2]!")) == "w4*3=2;[2]!"
    assert loaded.stop_token_ids == synthetic.stop_token_ids
    assert loaded.names_by_id == synthetic.names_by_id
    with pytest.raises(DataError, match="lacks"):
        loaded.encode("Hello")


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "$"}'},
        {
            "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizerFast", "eos_token": "$",'
            ' "legacy": false, "added_tokens_decoder": {}, "sp_model_kwargs": {}}',
            "special_tokens_map.json": '{"eos_token": {"content": "$", "lstrip": false}}',
        },
        {
            "tokenizer_config.json": '{"eos_token":"$","own_field":[1,{"deep":null}]}\n\n',
            "chat_template.jinja": "{{ messages[0]['content'] }}{{ eos_token }}",
            "additional_chat_templates/tool_use.jinja": "{{ tools }}",
            "vocab.json": "{}",
            "tokenization_own.py": "# named by auto_map, if a reader trusts it",
        },
    ],
)
def test_saved_files_are_to_the_byte_those_that_came(synthetic, tmp_path, files):
    came, saved = tmp_path / "came", tmp_path / "saved"
    synthetic.save(came)
    own = json.loads((came / "tokenizer_config.json").read_text())
    assert own["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert own.keys().isdisjoint({"is_local", "local_files_only"})
    for name, text in files.items():
        (came / name).parent.mkdir(exist_ok=True)
        (came / name).write_text(text)
    tokenizer = Tokenizer.load(str(came), (20,))
    for name in files:
        (came / name).rename(came.with_name("moved"))  # what was read at the start counts
        tokenizer.save(saved)
        came.with_name("moved").rename(came / name)
    for name in (*files, "tokenizer.json"):
        assert (saved / name).read_bytes() == (came / name).read_bytes(), name


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", '{"model": ', r"tokenizer\.json: not valid JSON"),
        ("tokenizer.json", '{"version": "1.0"}', "its tokenizer files cannot be loaded"),
        ("tokenizer_config.json", "[" * 100_000, r"tokenizer_config\.json: not valid JSON"),
        ("config.json", '{"eos_token_id": "2"}', r"config\.json: eos_token_id is 2; expected"),
        ("config.json", "[1]", r"config\.json: a JSON list, not an object"),
        ("chat_template.jinja", "{{ messages + 1 }}", "its chat template fails on"),
        ("chat_template.jinja", "{{ 1 // 0 }}", "its chat template fails on"),
        ("chat_template.jinja", "{{ range(10**9) }}", "its chat template fails on"),
    ],
)
def test_broken_tokenizer_files_are_named(synthetic, tmp_path, name, text, message):
    synthetic.save(tmp_path)
    came = (tmp_path / name).read_text() if (tmp_path / name).exists() else "{}"
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        Tokenizer.load(str(tmp_path))
    (tmp_path / name).write_text(came)
    Tokenizer.load(str(tmp_path))


def test_missing_tokenizers_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such tokenizer directory"):
        Tokenizer.load("nowhere")
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    Tokenizer.load(write_model(tmp_path))


def _change_config(model: Path, **settings) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text()) | settings
    (model / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("eos", ["<|absent|>", {"__type": "AddedToken", "content": "<|absent|>"}])
def test_an_eos_token_that_the_vocabulary_lacks_is_no_stop_token(tmp_path, eos):
    model = write_model(tmp_path)
    _change_config(tmp_path, eos_token=eos)
    with pytest.raises(
        DataError, match=r"'<\|absent\|>' is not in tokenizer.json.*student.stop_to"
    ):
        Tokenizer.load(model)
    assert Tokenizer.load(model, (258,)).stop_token_ids == (258,)
    (tmp_path / "added_tokens.json").write_text('{"<|absent|>": 261}')
    assert Tokenizer.load(model).stop_token_ids == (258, 256, 261)


@pytest.mark.parametrize("moved", [300, 5000])
def test_ids_with_a_gap_reach_to_the_largest(tmp_path, moved):
    model = write_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    saved = json.loads(file.read_text())
    saved["model"]["vocab"]["A"] = moved
    file.write_text(json.dumps(saved))
    tokenizer = Tokenizer.load(model, (moved,))
    assert tokenizer.encode("A") == [moved] == [*tokenizer.stop_token_ids]
    assert tokenizer.vocab_size == moved + 1
    with pytest.raises(DataError, match=rf"below {moved + 1}"):
        Tokenizer.load(model, (moved + 1,))


def test_named_templates_need_a_default(tmp_path):
    model = write_model(tmp_path)
    names = ("tool_use", "rag")
    (tmp_path / "chat_template.jinja").unlink()
    _change_config(tmp_path, chat_template=[{"name": name, "template": TEMPLATE} for name in names])
    with pytest.raises(DataError, match="are named rag, tool_use; expected one named default"):
        Tokenizer.load(model)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert Tokenizer.load(model).turn_end_id == 258
    (tmp_path / "chat_template.jinja").rename(tmp_path / "moved")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text(TEMPLATE)
    with pytest.raises(DataError, match="are named rag; expected one named default"):
        Tokenizer.load(model)


def test_a_template_that_only_a_processors_file_holds_is_read_and_copied(tmp_path):
    model = write_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert not Tokenizer.load(model).has_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert Tokenizer.load(model).turn_end_id == 258
    copy = tmp_path / "copy"
    copy.mkdir()
    copy_tokenizer(tmp_path, copy)
    assert Tokenizer.load(str(copy)).turn_end_id == 258


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_a_chat_template_that_is_no_text_is_refused(tmp_path, name):
    model = write_model(tmp_path)
    file = tmp_path / name
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | {"chat_template": 5}))
    with pytest.raises(
        DataError, match=rf"{name}: chat_template is 5; expected its text.*, or remove"
    ):
        Tokenizer.load(model)
    for remedy in ({"chat_template": TEMPLATE}, {}):
        file.write_text(json.dumps(settings | remedy))
        Tokenizer.load(model)


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer_config.json", "tokenizer.json"])
def test_an_added_token_with_two_ids_is_refused(tmp_path, name):
    model = write_model(tmp_path, added=("<x>",) if name == "tokenizer.json" else ())
    if name == "added_tokens.json":
        (tmp_path / name).write_text('{"<x>": 400}')
    elif name == "tokenizer.json":
        (tmp_path / name).write_text((tmp_path / name).read_text().replace("261", "400"))
    else:
        _change_config(tmp_path, added_tokens_decoder={"400": {"content": "<x>"}})
    with pytest.raises(DataError, match=rf"{name}: it gives '<x>' id 400, .* loaded with id 261"):
        Tokenizer.load(model)
    (tmp_path / name).write_text((tmp_path / name).read_text().replace("400", "261"))
    Tokenizer.load(write_model(tmp_path, added=("<x>",)))
