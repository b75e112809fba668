"""A run directory that is resumed with other settings."""

import pytest

from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.train import run_directory
from stable_opd_mcore.train.run_directory import keep_resolved, settings_changes
from tests.train.runs import tiny_config


def test_changed_settings_are_refused_unless_accepted(tmp_path):
    keep_resolved(tiny_config(tmp_path, "run"))
    changed = tiny_config(tmp_path, "run", optimizer={"lr": 2e-3}, kl={"beta": 0.2})
    assert (
        settings_changes(changed, accepted=False) == {}
    )  # no checkpoint: the run starts at step 0
    (tmp_path / "run" / "checkpoints" / "step_000001").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        settings_changes(changed, accepted=False)
    for part in ("optimizer.lr: 0.001 -> 0.002", "kl.beta: 0.1 -> 0.2", "run.name", "--accept-ch"):
        assert part in str(caught.value)
    accepted = settings_changes(changed, accepted=True)
    assert accepted == {"kl.beta": (0.1, 0.2), "optimizer.lr": (0.001, 0.002)}


def test_every_resolved_config_is_kept(tmp_path):
    for lr in (1e-3, 1e-3, 2e-3, 3e-3):
        keep_resolved(tiny_config(tmp_path, "run", optimizer={"lr": lr}))
    texts = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    assert {name: "lr: 0.00" + digit in texts[name] for name, digit in (
        ("config.resolved.001.yaml", "1"),
        ("config.resolved.002.yaml", "2"),
        ("config.resolved.yaml", "3"),
    )} == dict.fromkeys(texts, True)  # fmt: skip


def test_a_config_is_kept_before_a_newer_one_replaces_it(tmp_path, monkeypatch):
    keep_resolved(tiny_config(tmp_path, "run"))
    directory = tmp_path / "run"
    before = (directory / "config.resolved.yaml").read_bytes()
    write = run_directory.write_atomically

    def killed_at_the_newest(path, data):
        if path.name == "config.resolved.yaml":
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(run_directory, "write_atomically", killed_at_the_newest)
    with pytest.raises(KeyboardInterrupt):
        keep_resolved(tiny_config(tmp_path, "run", optimizer={"lr": 2e-3}))
    for name in ("config.resolved.yaml", "config.resolved.001.yaml"):
        assert (directory / name).read_bytes() == before
