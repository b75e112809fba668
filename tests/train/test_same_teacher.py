"""A served teacher is compared with teacher.path: scores of its files, and what differs named."""

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.files.huggingface import export_hf
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.records import Prompt
from stable_opd_mcore.scoring.from_files import TEMPERATURES, FileScores, scores_of_files
from stable_opd_mcore.serving.teacher import ServedTeacher
from stable_opd_mcore.train.same_teacher import allowed, compare_with_files
from tests.serving.http_server import Request, http_server
from tests.train.runs import tiny_architecture, tiny_config

SIZE = 96
_TURNED = {"rope_type": "default", "rope_theta": 200.0}
FIELDS = tiny_architecture(48, 2, vocab_size=SIZE, initializer_range=0.2)


class _Prompts:
    """Two of them; the teacher has a prompt of its own of the second."""

    def __len__(self) -> int:
        return 2

    def select(self, indices: Any) -> list[Prompt]:
        first = Prompt("p:0", "", tuple(range(3, 60)), golden_token_ids=tuple(range(60, 90)))
        return [first, replace(first, teacher_token_ids=tuple(range(80, 10, -2)))][: len(indices)]


@pytest.fixture(scope="module")
def directory(world, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("teacher") / "model"
    export_hf(build_model(read_architecture(FIELDS), world, trainable=False, seed=5), path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Of all runs of this file, so that the files are scored once."""
    return tmp_path_factory.mktemp("runs")


@contextlib.contextmanager
def served(
    directory: Path, temperature: float = 1.0, shift: float = 0.0, **settings: Any
) -> Iterator[str]:
    """A server's address. It scores with transformers' model of the directory with these settings,
    its embedding shifted, at a temperature."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **settings).eval()
    info = {"dtype": "float32", "model_path": str(directory), "tp_size": 1, "device": "cpu"}
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(shift)

    def reply(request: Request) -> tuple[int, bytes]:
        if request.path != "/generate":
            return (
                (200, json.dumps(info).encode()) if request.path == "/server_info" else (404, b"")
            )
        ids = torch.tensor(json.loads(request.body)["input_ids"])
        with torch.no_grad():
            log_p = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(1)
        values = log_p.gather(1, ids[1:, None])[:, 0].tolist()
        scored = [[v, i, None] for v, i in zip(values, ids[1:].tolist(), strict=True)]
        meta = {"input_token_logprobs": [[None, 0, None], *scored]}
        return 200, json.dumps({"meta_info": meta}).encode()

    with http_server(reply) as url:
        yield url


def compare(world: Any, home: Path, url: str, **teacher: Any) -> list[str]:
    """What a run says of these servers."""
    settings = {"architecture": None, "engine": "sglang", "urls": [url], **teacher}
    config = tiny_config(home, "run", teacher=settings, kl={"beta": 0.0})
    assert config.teacher is not None
    said: list[str] = []
    client = ServedTeacher(config.teacher, vocab_size=SIZE, temperature=1.0, patience_seconds=60.0)
    run: Any = SimpleNamespace(
        config=config, world=world, served_teacher=client, prompts=_Prompts()
    )
    try:
        compare_with_files(run, said.append, lambda: None)
    finally:
        client.close()
    return said


def test_the_teacher_of_the_files_passes(world, home, directory):
    with served(directory) as url:
        (said,) = compare(world, home, url, path=str(directory))
    assert f"and of {directory} differ by " in said
    assert "of 182 tokens, at most 0.00104 is expected" in said


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        ({"temperature": 0.7}, "temperature: its scores are those at 0.7, expected is 1"),
        ({"rope_parameters": _TURNED}, "the weights agree and the positions do not"),
        ({"shift": 0.02}, "its weights are not compared: RefusedRequest"),
    ],
)
def test_what_differs_is_named(world, home, directory, other, cause, caplog):
    """The first start has scored the files, and later ones read that."""
    with served(directory, **other) as url:
        with pytest.raises(UserError, match="the servers are not this teacher") as error:
            compare(world, home, url, path=str(directory))
        assert cause in str(error.value)
        with caplog.at_level(logging.WARNING):
            assert compare(world, home, url, path=str(directory), verify="warn") == []
        assert cause in caplog.text
        assert compare(world, home, url, path=str(directory), verify="skip") == []


def test_without_weights_it_is_said_that_nothing_is_compared(world, home, tmp_path, caplog):
    with http_server(lambda _: (500, b"")) as url:
        (said,) = compare(world, home, url)
        assert "no teacher.path" in said
        (tmp_path / "config.json").write_text(json.dumps(FIELDS))
        with caplog.at_level(logging.WARNING):
            assert compare(world, home, url, path=str(tmp_path)) == []
    assert "not compared with its files: " in caplog.text
    assert "download the weights" in caplog.text


def test_bf16_may_differ_by_some_times_its_own_rounding():
    exact = np.zeros((len(TEMPERATURES), 5), np.float32)
    scores = FileScores(exact, np.array([0.01, -0.02, 0.02, 3.0, 0.0], np.float32))
    assert allowed(scores, "bf16") == pytest.approx(0.08)
    assert allowed(scores, "fp32") == pytest.approx(0.001, abs=1e-4)


def test_a_broken_directory_says_what_the_process_found(directory, tmp_path):
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        scores_of_files(tmp_path, [[1, 2]])
