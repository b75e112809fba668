"""Conversion to Megatron's form and back is bit-identical, and both forms can be evaluated."""

import json
import shutil
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stable_opd_mcore.commands.convert import convert as conversion
from stable_opd_mcore.commands.convert.convert import convert
from stable_opd_mcore.commands.evaluate.evaluate import evaluate_config
from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import export_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.tensors import hf_shapes
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.persistence.stored_models import StoredModel
from tests.commands.check.directories import write_model as write_model_files
from tests.parallel.launch import run_ranks
from tests.train.runs import ALONE, problems, tiny_architecture, tiny_config

EVAL = problems(8, 6)


def write_model(path: Path) -> None:
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(read_architecture(tiny_architecture(32, 4)), world)
    export_hf(chunks, path, save_tokenizer=Tokenizer.load("synthetic").save)
    stop_world()


def convert_in_both_directions(home: Path) -> None:
    write_model(home / "hf")
    hf, other, bare = home / "hf", home / "other", home / "bare"
    shutil.copytree(hf, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    for source, target, words in (
        (home / "absent", other, "no model, checkpoint or adapter"),
        (home, other, r"no config\.json .*; give the directory of one: in that of a run, model/"),
        (hf, hf / "inside", "would then hold two models; give a directory elsewhere"),
        (hf, bare, "exists; give a directory that does not"),
        (bare, other, r"no tokenizer\.json in it.*with --tokenizer"),
    ):
        with pytest.raises(UserError, match=words):
            convert(source, target)
    convert(bare, other, tokenizer=hf)
    assert (other / "tokenizer.json").is_file()
    assert convert(home / "hf", home / "megatron") == "Hugging Face to Megatron, in fp32"
    assert convert(home / "megatron", home / "again") == "Megatron to Hugging Face, in fp32"
    for form in ("hf", "megatron"):
        student = {"path": str(home / form), "architecture": None}
        settings = {"num_samples": 2, "temperature": 1.0, "max_new_tokens": 8}
        evaluate_config(
            tiny_config(
                home,
                form + "_run",
                student=student,
                data=EVAL,
                evaluation={**settings, "model": str(home / form)},
            ),
            print_line=print,
        )


def train_and_convert(home: Path) -> None:
    shutil.copytree(home / "hf", home / "student")
    generation = {"eos_token_id": [20, 21]}
    (home / "student" / "generation_config.json").write_text(json.dumps(generation))
    student = {"path": str(home / "student"), "architecture": None}
    config = tiny_config(
        home,
        "run",
        student=student | {"window": 200, "rope_theta": 40000.0},
        tokenizer={"path": str(home / "student")},
        train={"steps": 1},
        **ALONE,
        objective={"name": "sft"},
        checkpoint={"every": 1},
        rollout={"samples_per_prompt": 1, "save": "none"},
    )
    train(config)
    start_world(ParallelConfig(), seed=0)
    convert(home / "run" / "checkpoints" / "step_000001", home / "exported")


def test_a_checkpoint_converts_to_a_model_with_tokenizer_window_and_generation_settings(home):
    trained, exported = home / "run" / "model", home / "exported"
    for directory in (trained, exported):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        encoded = tokenizer("12+3=", add_special_tokens=False).input_ids
        assert encoded == Tokenizer.load("synthetic").encode("12+3=")
        assert set(Tokenizer.load(str(directory)).stop_token_ids) == {20, 21}
        config = json.loads((directory / "config.json").read_text())
        assert (config["max_position_embeddings"], config["rope_theta"]) == (200, 40000.0)
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    for name in names | {"model.safetensors"}:
        assert (trained / name).read_bytes() == (exported / name).read_bytes()


def convert_weights_of_types(directory: Path) -> None:
    """They keep their values, whatever type config.json names."""
    for stored, named in TYPES:
        home = directory / f"{'_'.join(stored)}_{named}"
        shutil.copytree(directory / "hf", home / "hf")
        file, settings = home / "hf" / "model.safetensors", home / "hf" / "config.json"
        types = cycle(getattr(torch, name) for name in stored)
        weights = load_file(file)
        save_file({name: weights[name].to(next(types)) for name in weights}, file)
        config = json.loads(settings.read_text())
        config.pop("dtype", None), config.pop("torch_dtype", None)
        settings.write_text(json.dumps(config | ({"dtype": named} if named else {})))
        said = convert(home / "hf", home / "megatron")
        assert ("rounded" in said) == ("float64" in stored)
        convert(home / "megatron", home / "again")
        before, after = load_file(file), load_file(home / "again" / "model.safetensors")
        kept = torch.bfloat16 if set(stored) == {"bfloat16"} else torch.float32
        assert {tensor.dtype for tensor in after.values()} == {kept}
        for name, tensor in before.items():
            assert torch.equal(tensor.to(kept), after[name]), (stored, named, name)


TYPES = [  # of the weights, and the one that config.json names
    (("float32",), "bfloat16"),
    (("float32",), None),
    (("bfloat16",), "float32"),
    (("bfloat16",), None),
    (("float16",), "float16"),
    (("bfloat16", "float32"), "bfloat16"),
    (("float64",), "float32"),
]


def convert_all(rank: int, world_size: int, directory: str) -> None:
    convert_in_both_directions(Path(directory))
    convert_weights_of_types(Path(directory))
    train_and_convert(Path(directory))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    run_ranks(1, convert_all, str(directory))
    return directory


def test_a_tokenizer_with_other_ids_than_the_models_is_refused(tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(tiny_architecture(32, 4)))
    other.mkdir()
    write_model_files(other)
    with pytest.raises(UserError, match=r"no row for the .* id, \d+: set --tokenizer to the model"):
        convert(source, tmp_path / "target", tokenizer=other)
    Tokenizer.load("synthetic").save(source)
    (source / "config.json").write_text(json.dumps(tiny_architecture(32, 4) | {"vocab_size": 999}))
    with pytest.raises(
        UserError, match=r"different tokenizers: .*give the model's own --tokenizer"
    ):
        convert(source, tmp_path / "target", tokenizer=other)


def test_what_is_rounded_is_said(tmp_path, monkeypatch):
    architecture, adapter = read_architecture(tiny_architecture(32, 4)), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    factors = {"a": torch.zeros(1, dtype=torch.float16)}
    save_file(factors, adapter / "adapter_model.safetensors")
    of_run = StoredModel(tmp_path, "step", is_whole=False)
    monkeypatch.setattr(conversion, "is_megatron", lambda path: path == tmp_path)
    monkeypatch.setattr(conversion, "run_settings", lambda _: {"train": {"precision": "bf16"}})
    for dtype, of_adapter, trained in (
        (torch.bfloat16, ("bf16", ", factors rounded from F16"), ("bf16", "")),
        (torch.float32, ("fp32", ""), ("bf16", ", weights rounded from F32")),
        (torch.float64, *((each, ", weights rounded from F64") for each in ("fp32", "bf16"))),
    ):
        shapes = hf_shapes(architecture).items()
        weights = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes}
        save_file(weights, tmp_path / "model.safetensors")
        model = StoredModel(adapter, "adapter", is_whole=False)
        assert conversion._precision(model, tmp_path, architecture) == of_adapter
        assert conversion._precision(of_run, tmp_path, architecture) == trained


def test_conversion_in_both_directions_is_bit_identical(home):
    before, after = (
        {file.name: file.read_bytes() for file in (home / form).iterdir()}
        for form in ("hf", "again")
    )
    assert {"model.safetensors", "config.json", "tokenizer.json"} < before.keys()
    assert before == after

    places = [home / f"{form}_run" / "evaluation" / form for form in ("hf", "megatron")]
    first, second = (json.loads((place / "results.json").read_text()) for place in places)
    assert first["model"].pop("path") != second["model"].pop("path")
    assert first == second
    assert first["benchmarks"]["held_out"]["num_problems"] == 6
    rows = (places[0] / "responses" / "held_out" / "part_00000.jsonl").read_text().splitlines()
    assert len(rows) == 12
