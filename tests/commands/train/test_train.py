"""The checks before the start: what `train` prints, and that their errors end it before a model."""

import contextlib
from pathlib import Path

import pytest

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.train import loop
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_config


def no_model(*_):
    raise AssertionError("a model was built")


def refused_on_every_rank(rank: int, directory: str) -> None:
    config = tiny_config(
        directory,
        "run",
        sampling={"max_new_tokens": 128},
        data={"train": {"path": f"{directory}/absent.jsonl"}},
    )
    loop.build_run = no_model
    with (
        open(f"{directory}/printed_{rank}", "w") as file,
        contextlib.redirect_stderr(file),
        pytest.raises(ConfigError, match=r"found 3 errors[^$]*absent\.jsonl: no such file"),
    ):
        train(config)


class Enough(Exception):
    """Raised in place of building the models."""


def reads_data_once(rank: int, directory: str) -> None:
    def build_run(inputs, *_):
        raise Enough(inputs)

    loop.build_run = build_run
    with contextlib.redirect_stderr(None), pytest.raises(Enough) as caught:
        train(tiny_config(directory, "run"))
    (inputs,) = caught.value.args
    assert ("prompts" in inputs.parts) is (rank == 0)


def train_twice(rank: int, world_size: int, directory: str) -> None:
    refused_on_every_rank(rank, directory)
    assert not (Path(directory) / "run").exists()
    reads_data_once(rank, directory)


def test_the_checks_end_every_rank_before_a_model_is_built_or_hand_over_what_they_read(tmp_path):
    run_ranks(2, train_twice, str(tmp_path))
    printed = (tmp_path / "printed_0").read_text()
    assert "student stops on 20 '$'" in printed
    assert "ERROR" not in printed  # the exception says them
    assert (tmp_path / "printed_1").read_text() == ""
