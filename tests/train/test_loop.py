"""The checks before the start: what `train` prints, and that their errors end it before a model."""

import contextlib

import pytest

from stable_opd_mcore.errors import ConfigError, NotFiniteError
from stable_opd_mcore.models.directory_save import DirectorySave
from stable_opd_mcore.parallel.world import stop_world
from stable_opd_mcore.train import loop
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_config


def no_model(*_):
    raise AssertionError("a model was built")


def refused_on_every_rank(rank: int, world_size: int, directory: str) -> None:
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
        loop.train(config)


def test_errors_of_the_checks_end_every_rank_before_a_model_is_built(tmp_path):
    run_ranks(2, refused_on_every_rank, str(tmp_path))
    printed = (tmp_path / "printed_0").read_text()
    assert "student stops on 20 '$'" in printed
    assert "ERROR" not in printed  # the exception says them
    assert (tmp_path / "printed_1").read_text() == ""
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_not_finite_leaves_the_checkpoint_that_is_being_written(
    tmp_path, monkeypatch
):
    train_step = loop.train_step

    def second_is_not_finite(run, state):
        if state.step:
            raise NotFiniteError("for the test")
        return train_step(run, state)

    monkeypatch.setattr(loop, "train_step", second_is_not_finite)
    monkeypatch.setattr(DirectorySave, "is_written", lambda _: False)
    with pytest.raises(NotFiniteError, match="for the test"):
        loop.train(tiny_config(tmp_path, "run", checkpoint={"every": 1}))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_000001"]
    stop_world()
