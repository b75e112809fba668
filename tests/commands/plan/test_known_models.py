"""Sizes of the models that the shipped configs name, and what counts more than them."""

import json
from pathlib import Path

import pytest

from stable_opd_mcore.commands.plan.known_models import model_source
from stable_opd_mcore.commands.plan.planned_run import read_models
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.models import ModelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.placement.layout import Layout
from stable_opd_mcore.placement.model_size import ModelSize
from tests.commands.plan.cases import CONFIGS, QWEN_7B
from tests.hub_server import COMMIT, hub_server, use_hub

# The model cards state them; a tied head counts once.
MILLIONS = {
    "sft_1p5b": 1544,
    "sft_7b": 7616,
    "stable_opd_32b": 32764,
    "stable_opd_30b_a3b": 30532,
    "stable_opd_8b_235b": 8191,
    "recipes/gpt_oss_20b_120b": 20915,
    "recipes/moonlight": 15960,
    "recipes/gemma3_4b_27b": 3880,  # 4,300 with the vision tower
}


@pytest.mark.parametrize("name", MILLIONS)
def test_published_sizes_have_the_published_number_of_parameters(name):
    source, note = model_source(load_config(CONFIGS / f"{name}.yaml").student, "student")
    size = ModelSize(read_architecture(source), Layout(1))
    assert round(size.total_parameters() / 1e6) == MILLIONS[name]
    assert "is absent: sizes as published" in str(note)


def test_the_supervised_runs_ask_for_the_window_that_later_runs_start_with():
    models = read_models(load_config(CONFIGS / "sft_7b.yaml"))
    later = read_models(load_config(CONFIGS / "stable_opd_7b.yaml"))
    for student in (models.student, later.student):
        assert (student.max_positions, student.rotary.theta) == (16384, 40000.0)
    published, _ = model_source(ModelConfig(path="models/Qwen2.5-Math-7B"), "student")
    assert read_architecture(published).max_positions == 4096


def test_a_directory_counts_more_than_the_table(tmp_path):
    directory = tmp_path / "Qwen2.5-Math-7B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN_7B))
    model = ModelConfig(path=str(directory))
    assert model_source(model, "student") == (str(directory), None)
    with pytest.raises(UserError, match=r"teacher.path=/nowhere: no such directory"):
        model_source(ModelConfig(path="/nowhere"), "teacher")


def test_of_a_hub_id_config_json_alone_is_read_from_the_cache_too(tmp_path, monkeypatch):
    files = {"config.json": json.dumps(QWEN_7B).encode(), "model.safetensors": b"weights"}
    model = ModelConfig(path="me/model", revision=COMMIT)
    with hub_server({"models/me/model": files}) as (url, _):
        use_hub(monkeypatch, url, tmp_path)
        source, note = model_source(model, "student")
    assert [path.name for path in Path(str(source)).iterdir()] == ["config.json"]
    assert read_architecture(source).num_layers == QWEN_7B["num_hidden_layers"]
    assert model_source(model, "student") == (source, note) == (source, None)
    with pytest.raises(UserError, match=r"or to a hub id with student\.revision"):
        model_source(ModelConfig(path="me/model"), "student")
