"""Every config that a run was started with is kept."""

import pytest

from stable_opd_mcore.train.persistence import resolved_configs
from stable_opd_mcore.train.persistence.resolved_configs import keep_resolved
from tests.train.runs import tiny_config


def test_every_resolved_config_is_kept(tmp_path):
    for lr in (1e-3, 1e-3, 2e-3, 3e-3):
        keep_resolved(tiny_config(tmp_path, "run", optimizer={"lr": lr}))
    texts = {path.name: path.read_text() for path in (tmp_path / "run").glob("*.yaml")}
    assert {name: "lr: 0.00" + digit in texts[name] for name, digit in (
        ("config.resolved.001.yaml", "1"),
        ("config.resolved.002.yaml", "2"),
        ("config.resolved.yaml", "3"),
    )} == dict.fromkeys(texts, True)  # fmt: skip


def test_a_config_is_kept_before_a_newer_one_replaces_it(tmp_path, monkeypatch):
    keep_resolved(tiny_config(tmp_path, "run"))
    directory = tmp_path / "run"
    before = (directory / "config.resolved.yaml").read_bytes()
    write = resolved_configs.write_atomically

    def killed_at_the_newest(path, data):
        if path.name == "config.resolved.yaml":
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(resolved_configs, "write_atomically", killed_at_the_newest)
    with pytest.raises(KeyboardInterrupt):
        keep_resolved(tiny_config(tmp_path, "run", optimizer={"lr": 2e-3}))
    for name in ("config.resolved.yaml", "config.resolved.001.yaml"):
        assert (directory / name).read_bytes() == before
