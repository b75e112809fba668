"""Conversion to Megatron's form and back is bit-identical, and both forms can be evaluated."""

import json
from pathlib import Path

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.models.build import build_model
from stable_opd_mcore.models.families import read_architecture
from stable_opd_mcore.models.huggingface import export_hf
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.train.convert import convert
from stable_opd_mcore.train.evaluation import evaluate_config
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_architecture, tiny_config

EVAL = {
    "train": {"path": "synthetic:arithmetic", "options": {"rows": 8}},
    "eval": {"path": "synthetic:arithmetic", "split": "test", "options": {"rows": 6}},
}


def convert_in_both_directions(rank: int, world_size: int, directory: str) -> None:
    home = Path(directory)
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(read_architecture(tiny_architecture(32, 4)), world)
    export_hf(chunks, home / "hf", save_tokenizer=Tokenizer.load("synthetic").save)
    stop_world()
    assert convert(home / "hf", home / "megatron") == "Hugging Face to Megatron"
    assert convert(home / "megatron", home / "again") == "Megatron to Hugging Face"
    for form in ("hf", "megatron"):
        student = {"path": str(home / form), "architecture": None}
        settings = {"num_samples": 2, "temperature": 1.0, "max_new_tokens": 8}
        evaluate_config(
            tiny_config(home, form + "_run", student=student, data=EVAL, evaluation=settings),
            print_line=print,
        )


def test_conversion_in_both_directions_is_bit_identical(tmp_path):
    run_ranks(1, convert_in_both_directions, str(tmp_path))
    before, after = (
        {file.name: file.read_bytes() for file in (tmp_path / form).iterdir()}
        for form in ("hf", "again")
    )
    assert {"model.safetensors", "config.json", "tokenizer.json"} < before.keys()
    assert before == after

    results = [tmp_path / f"{form}_run" / "evaluation.json" for form in ("hf", "megatron")]
    first, second = (json.loads(path.read_text()) for path in results)
    assert first == second
    assert first["held_out"]["num_prompts"] == 6
    rows = (tmp_path / "hf_run" / "evaluation" / "held_out.jsonl").read_text().splitlines()
    assert len(rows) == 12
