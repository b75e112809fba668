"""Weights are refused as train refuses them; only their headers are read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stable_opd_mcore.commands.check import model_directories
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files import megatron_checkpoint, peft_loading
from stable_opd_mcore.models.files.manifest import MANIFEST
from stable_opd_mcore.models.files.megatron_checkpoint import load_weights
from stable_opd_mcore.models.tensors import hf_shapes
from tests.commands.check.directories import TEMPLATE, write_model
from tests.train.runs import tiny_config

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    path = write_model(tmp_path / "model")
    architecture = read_architecture(path)
    tensors = {name: torch.zeros(shape) for name, shape in hf_shapes(architecture).items()}
    save_file(tensors, f"{path}/model.safetensors")
    return path, tensors


def check(tmp_path, path, **fields):
    student = {"path": path, "architecture": None, **fields}
    config = tiny_config(tmp_path, "run", student=student, tokenizer={"path": None}, teacher=None,
                         objective={"name": "grpo"}, kl={"beta": 0})  # fmt: skip
    return list(model_directories.weights(RunInputs(config, None)))


def test_whole_weights_give_no_finding(tmp_path, model):
    assert check(tmp_path, model[0]) == []


def test_files_of_weights_that_are_not_read_are_named(tmp_path, model):
    path, tensors = model
    for name in ("pytorch_model.bin", "model-00002-of-00003.safetensors"):
        save_file(tensors, f"{path}/{name}")
    (finding,) = check(tmp_path, path)
    assert finding.values[0] == ("not read", "model-00002-of-00003.safetensors, pytorch_model.bin")


def test_a_directory_that_may_mean_another_model_is_refused(tmp_path, model):
    path, tensors = model
    index, adapter = (tmp_path / "model" / name for name in (INDEX, "adapter_config.json"))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert check(tmp_path, path) == []
    save_file(tensors, f"{path}/new.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "new.safetensors")}))
    with pytest.raises(UserError, match=r"two sets of weights, model\.safetensors and"):
        check(tmp_path, path)
    adapter.write_text("{}")
    with pytest.raises(UserError, match=r"holds adapter_config\.json; .*or move its files away"):
        check(tmp_path, path)
    adapter.unlink()
    index.unlink()
    check(tmp_path, path)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path):
    path = write_model(tmp_path / "model", tie_word_embeddings=True)
    shapes = hf_shapes(read_architecture(path))
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, f"{path}/model.safetensors")
    assert check(tmp_path, path) == []
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, f"{path}/model.safetensors")
    with pytest.raises(
        UserError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but"
    ):
        check(tmp_path, path)
    save_file({**tensors, "lm_head.weight": torch.zeros(3, 32)}, f"{path}/model.safetensors")
    with pytest.raises(UserError, match=r"differs .*; set that to false, or remove lm_head"):
        check(tmp_path, path)
    del tensors["lm_head.weight"]
    save_file(tensors, f"{path}/model.safetensors")
    assert check(tmp_path, path) == []
    untied = write_model(tmp_path / "untied")
    save_file(tensors, f"{untied}/model.safetensors")
    with pytest.raises(UserError, match=r"tie_word_embeddings=true, .*; set that if the model was"):
        check(tmp_path, untied)
    save_file({**tensors, "lm_head.weight": torch.zeros(272, 32)}, f"{untied}/model.safetensors")
    assert check(tmp_path, untied) == []


HEAD, LAST = "lm_head.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("unlisted", "added", "words"),
    [
        ([HEAD], {}, r"b\.safetensors: lm_head\.weight differs from model\.embed_tokens\.weight"),
        ([], {"model.layers.9.mlp.up_proj.weight": torch.ones(3)}, "layers.9.* no place in the mo"),
        ([], {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.* no place in the"),
        ([], {LAST: torch.ones(32)}, r"a\.safetensors and b\.safetensors both hold .*model\.norm"),
        ([LAST], {LAST: torch.ones(32)}, r"both hold tensor model\.norm\.weight; download"),
        ([LAST], {}, None),  # transformers reads it, too
    ],
)
def test_tensors_that_the_index_leaves_out_are_read(tmp_path, unlisted, added, words):
    path = write_model(tmp_path / "model", tie_word_embeddings=HEAD in unlisted)
    shapes = {HEAD: (272, 32), **hf_shapes(read_architecture(path))}
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    in_b = (HEAD, "model.embed_tokens.weight")
    files = {name: f"{'b' if name in in_b else 'a'}.safetensors" for name in tensors}
    for file in set(files.values()):
        kept = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(kept | (added if file[0] == "b" else {}), f"{path}/{file}")
    listed = {name: file for name, file in files.items() if name not in unlisted}
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": listed}))
    if words is None:
        assert check(tmp_path, path) == []
    else:
        with pytest.raises(UserError, match=words):
            check(tmp_path, path)
        kept = {name: tensors[name] for name in in_b if name not in unlisted}
        save_file(kept, f"{path}/b.safetensors")  # without what is wrong there
        check(tmp_path, path)


def test_a_distributed_checkpoint_of_another_program_is_refused_in_the_words_of_train(tmp_path):
    path = write_model(tmp_path / "model")
    (tmp_path / "model" / ".metadata").write_bytes(b"")
    with pytest.raises(UserError, match=r"without manifest\.json.*another program's") as by_check:
        check(tmp_path, path)
    with pytest.raises(UserError) as by_train:
        load_weights([], path)
    assert str(by_check.value) == str(by_train.value)


def test_other_weights_next_to_a_distributed_checkpoint_are_named(tmp_path, monkeypatch):
    path = write_model(tmp_path / "model")
    for name in (".metadata", "rng_rank_0.safetensors", "model.safetensors"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "model" / MANIFEST).write_text('{"files": {"rng_rank_0.safetensors": [0, ""]}}')
    monkeypatch.setattr(megatron_checkpoint, "refuse_factors", lambda _: None)  # its metadata
    (finding,) = check(tmp_path, path)
    assert finding.values[0] == ("not read", "model.safetensors")


def test_a_teacher_with_the_students_weights_and_prompt_is_found(tmp_path, model):
    path, tensors = model
    copy = shutil.copytree(path, tmp_path / "copy")
    other = shutil.copytree(path, tmp_path / "other")
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(changed, other / "model.safetensors")
    student = {"path": path, "architecture": None}
    for teacher, found in (
        ({"path": str(copy)}, 1),
        ({"path": "self"}, 1),
        ({"path": str(other)}, 0),
        ({"path": str(copy), "prompt": "{{ problem }}"}, 0),
    ):
        teacher = teacher | {"architecture": None}
        config = tiny_config(
            tmp_path, "run", student=student, teacher=teacher, tokenizer={"path": None}
        )
        assert len(list(model_directories.same_weights(RunInputs(config, None)))) == found
    for place in (path, copy):  # distributed checkpoints
        (Path(place) / "model.safetensors").rename(Path(place) / "__0_0.distcp")
    config = tiny_config(
        tmp_path,
        "run",
        student=student,
        teacher={"path": str(copy), "architecture": None},
        tokenizer={"path": None},
    )
    assert len(list(model_directories.same_weights(RunInputs(config, None)))) == 1
    adapted = student | {"lora": {"path": str(tmp_path / "adapter")}}  # does not start as its base
    teacher = {"path": str(copy), "architecture": None}
    config = tiny_config(
        tmp_path, "run", student=adapted, teacher=teacher, tokenizer={"path": None}
    )
    assert list(model_directories.same_weights(RunInputs(config, None))) == []


def test_a_reference_that_is_not_as_the_student_is_refused_or_found(tmp_path, model):
    student = {"path": model[0], "architecture": None}

    def found(**changes):
        path = write_model(tmp_path / "reference", **changes)
        config = tiny_config(tmp_path, "run", student=student, tokenizer={"path": None},
                             reference={"path": path}, kl={"beta": 0.1})  # fmt: skip
        return [
            each.values[0] for each in model_directories.reference_settings(RunInputs(config, None))
        ]

    assert found(max_position_embeddings=64, initializer_range=0.1) == []
    assert found(attention_scale=2.0) == [("reference", "attention_scale=2.0")]
    assert found(rename={"<|box_start|>": "<box>"}) == [("student", "'<|box_start|>'")]
    for changes, words in (
        ({"rms_norm_eps": 1e-3}, r"rms_norm_eps=0\.001 \(the student has 1e-06\); expected the"),
        ({"rope_theta": 7e4}, r"config\.json: rotary=Rotary\(size=8, theta=70000\.0"),
        ({"swap": ("a", "b")}, "have different tokenizers"),
    ):
        with pytest.raises(UserError, match=words):
            found(**changes)


def test_an_adapter_of_another_model_is_found(tmp_path, model, monkeypatch):
    monkeypatch.setattr(peft_loading, "check_adapter", lambda *_: {})  # its tensors
    student = {"path": model[0], "architecture": None, "lora": {"path": str(tmp_path)}}
    config = tiny_config(tmp_path, "run", student=student, tokenizer={"path": None})
    for base, found in (("me/model", 0), (None, 0), ("/elsewhere/other", 1)):
        settings = {"peft_type": "LORA", "base_model_name_or_path": base}
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        findings = list(model_directories.adapter(RunInputs(config, None)))
        assert [f.values[0][1] for f in findings] == [base] * found


def test_what_an_adapter_has_next_to_its_factors_is_found(tmp_path, model, monkeypatch):
    monkeypatch.setattr(peft_loading, "check_adapter", lambda *_: {})  # its tensors
    student = {"path": model[0], "architecture": None, "lora": {"path": str(tmp_path / "adapter")}}
    config = tiny_config(tmp_path, "run", student=student, tokenizer={"path": None})

    def found(**changes):
        path = Path(write_model(tmp_path / "adapter", **changes))
        for name in ("config.json", "generation_config.json"):
            (path / name).unlink()
        (path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_dropout": 0.1}')
        return [each.values[0] for each in model_directories.adapter(RunInputs(config, None))]

    dropout = ("adapter", "lora_dropout=0.1")
    assert found() == [dropout]
    place = f"{tmp_path / 'adapter'}, not read"
    assert found(template=TEMPLATE.replace("assistant", "model")) == [
        dropout, (place, r"'<|im_start|>user\n1+1<|im_end|>\n<|im_start|>model\n'"),
    ]  # fmt: skip
    assert found(rename={"<|im_end|>": "<s>", "<s>": "<|im_end|>"})[1:] == [(place, "(260, 256)")]
    (tmp_path / "adapter" / "adapter_model.bin").touch()
    assert found() == [dropout, ("not read", "adapter_model.bin")]
    with pytest.raises(UserError, match=r"different tokenizers: id .*: give an adapter of this"):
        found(swap=("a", "b"))


def test_damaged_weights_are_refused(tmp_path, model):
    """tests/models/files/test_huggingface.py has every damage, refused by the same code."""
    path, tensors = model
    tensors["model.norm.weight"] = torch.zeros(16)
    save_file(tensors, f"{path}/model.safetensors")
    with pytest.raises(UserError, match=r"model.norm.weight has shape \(16,\), expected \(32,\)"):
        check(tmp_path, path)


def test_a_config_json_that_is_not_computed_is_refused_or_named_whosever_it_is(tmp_path):
    def found(role, **fields):
        section = {"path": write_model(tmp_path / "model", **fields), "architecture": None}
        config = tiny_config(tmp_path, "run", **{role: section})
        return [each.values[0] for each in model_directories.settings_of_models(RunInputs(config))]

    for role in ("student", "teacher"):
        with pytest.raises(UserError, match="is_causal=False is not supported"):
            found(role, is_causal=False)
        named = (role, "attn_logit_softcapping=50.0")
        assert found(role, attn_logit_softcapping=50.0) == [named]
        assert found(role) == []


@pytest.mark.parametrize("tied", [False, True])
def test_a_stop_token_whose_row_was_never_trained_is_found_with_low_rank_factors(tmp_path, tied):
    path = write_model(tmp_path / "model", vocab_size=320, tie_word_embeddings=tied)
    shapes = hf_shapes(read_architecture(path))
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    head += 1 + 0.02 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    student = {"path": path, "architecture": None, "lora": {}}
    inputs = RunInputs(
        tiny_config(tmp_path, "run", student=student, tokenizer={"path": None}), None
    )
    stops = list(inputs.tokenizer.stop_token_ids)
    save_file(tensors, f"{path}/model.safetensors")
    (finding,) = model_directories.untrained_stops(inputs)
    assert (
        finding.values[0][1] == finding.values[1][1] == inputs.pair.student.named_all(tuple(stops))
    )
    head[stops] += 0.1  # every element of their rows
    save_file(tensors, f"{path}/model.safetensors")
    assert list(model_directories.untrained_stops(inputs)) == []
