"""`convert --push-to-hub`: what arrives on a hub of this machine, and what is refused before."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from stable_opd_mcore.cli import app
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.files.megatron_checkpoint import is_megatron
from stable_opd_mcore.train.persistence.stored_models import mark_trained
from tests.commands.convert.test_convert import write_model
from tests.hub_server import upload_server, use_hub
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_config

TOKEN = "hf_of_the_environment"


def push(*words: str) -> str:
    return CliRunner().invoke(app, ["convert", *words], catch_exceptions=False).stdout


def write_models(rank: int, world_size: int, directory: str) -> None:
    write_model(Path(directory) / "model")


# As a run's settings name a model that it has downloaded
CACHED = f"/secret/hub/models--Qwen--Qwen3-1.7B/snapshots/{'0' * 40}"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run's directory with a model, an adapter and a file that is not to be uploaded."""
    home = tmp_path_factory.mktemp("runs")
    run_ranks(1, write_models, str(home))
    path = home / "a_run"
    student = {"path": CACHED, "revision": "0" * 40, "architecture": None}
    config = tiny_config(home, "a_run", student=student)
    path.mkdir()
    save_config(config, path / "config.resolved.yaml")
    shutil.move(home / "model", path / "model")
    (path / "model" / "notes.py").write_text("not a model's file")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": CACHED, "r": 8}
    for folder in (path / "adapter", path / "adapter" / "causal_lm"):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        (folder / "adapter_model.safetensors").write_bytes(b"factors")
    (path / "model" / "additional_chat_templates").mkdir()
    (path / "model" / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    for name in ("model", "adapter"):
        mark_trained(path / name, "a_run", 20)
    return path


def test_a_model_and_an_adapter_are_uploaded_with_their_cards(run, tmp_path, monkeypatch):
    with upload_server(TOKEN) as (url, files, created):
        use_hub(monkeypatch, url, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        report = "https://example.org/report.html"
        said = push(str(run / "model"), "--push-to-hub=me/whole", f"--report-url={report}")
        assert said.startswith(f"uploaded: {url}/me/whole/commit/")
        shutil.copytree(run / "adapter", tmp_path / "moved")  # away from its run
        push(str(tmp_path / "moved"), "--push-to-hub=me/factors")
        monkeypatch.setenv("HF_TOKEN", "wrong")
        with pytest.raises(UserError, match=r"me/whole: the upload failed \(.*401"):
            push(str(run / "model"), "--push-to-hub=me/whole")
    assert [json.loads(body)["visibility"] for body in created] == ["private"] * 2
    whole = files["me/whole"]
    assert whole["model.safetensors"] == (run / "model" / "model.safetensors").read_bytes()
    assert {"config.json", "tokenizer.json", "README.md"} <= whole.keys()
    assert "additional_chat_templates/rag.jinja" in whole
    assert "notes.py" not in whole
    card = ModelCard(whole["README.md"].decode())
    assert card.data.base_model == "Qwen/Qwen3-1.7B"
    assert card.data.library_name == "transformers"
    for line in (
        f"| Base | Qwen/Qwen3-1.7B at {'0' * 40} |",
        "| Data | synthetic:arithmetic |",
        "| Objective | objective.name=opd, kl.beta=0.1, mixture.lambda=0.5 |",
        "| Run | a_run, step 20 |",
        f"| Report | {report} |",
    ):
        assert line in card.text.splitlines()
    factors = files["me/factors"]
    pair = {"adapter_config.json", "adapter_model.safetensors"}
    of_causal_lm = {f"causal_lm/{name}" for name in pair}
    assert factors.keys() == {*pair, *of_causal_lm, "trained.json", "README.md"}
    for name in factors:
        assert b"secret" not in factors[name], name
    for name in ("adapter_config.json", "causal_lm/adapter_config.json"):
        settings = json.loads(factors[name])
        assert settings["base_model_name_or_path"] == "Qwen/Qwen3-1.7B"
        assert settings["revision"] == "0" * 40
    card = ModelCard(factors["README.md"].decode())
    assert card.data.library_name == "peft"
    assert f"| Base | Qwen/Qwen3-1.7B at {'0' * 40} |" in card.text
    assert "| Run | a_run, step 20 |" in card.text


def convert_and_push(rank: int, world_size: int, directory: str, model: str) -> None:
    home = Path(directory)
    push(model, str(home / "megatron"))
    assert is_megatron(home / "megatron")
    with upload_server(TOKEN) as (url, files, _), pytest.MonkeyPatch.context() as monkeypatch:
        use_hub(monkeypatch, url, home / "cache")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        push(str(home / "megatron"), str(home / "again"), "--push-to-hub=me/converted")
        with pytest.raises(UserError, match="nor an adapter; name a TARGET to convert it to"):
            push(str(home / "megatron"), "--push-to-hub=me/megatron")
        assert files.keys() == {"me/converted"}
    sent = files["me/converted"]["model.safetensors"]
    assert sent == (Path(model) / "model.safetensors").read_bytes()
    assert "| Base | none named |" in files["me/converted"]["README.md"].decode()


def test_a_converted_model_is_uploaded_and_megatrons_form_is_not(run, tmp_path):
    run_ranks(1, convert_and_push, str(tmp_path), str(run / "model"))


def test_what_cannot_be_uploaded_is_refused_before_the_conversion(run, tmp_path, monkeypatch):
    """Every remedy makes it the last line."""
    monkeypatch.chdir(tmp_path)
    with upload_server(TOKEN) as (url, files, _):
        use_hub(monkeypatch, url, tmp_path / "cache")
        for words, message, token in (
            ((), "no TARGET: name the directory to write, or use --push-to-hub OWNER/NAME", TOKEN),
            (("--push-to-hub=name",), "--push-to-hub name: not OWNER/NAME", TOKEN),
            (("--push-to-hub=me/m",), "the variable HF_TOKEN is not set; give it a token", ""),
            (("new", "--push-to-hub=me/m"), "a Megatron checkpoint.*; leave TARGET out", TOKEN),
            (("--revision=main",), "only a hub id has revisions; leave it out", TOKEN),
        ):
            monkeypatch.setenv("HF_TOKEN", token)
            with pytest.raises(UserError, match=message):
                push(str(run / "model"), *words)
            assert not (tmp_path / "new").exists()
            assert not files
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        push(str(run / "model"), "--push-to-hub=me/m")
        assert files.keys() == {"me/m"}
