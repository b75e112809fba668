"""What engines and trackers need is refused before any model is loaded, in the words of `train`."""

import pytest

from stable_opd_mcore.commands.check.checklist import check_config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.loading import missing_tracker
from stable_opd_mcore.inputs.run_inputs import Place
from stable_opd_mcore.placement.hardware import Cluster
from stable_opd_mcore.rollout.replay import replay_engine
from stable_opd_mcore.rollout.sglang.server_setup import refuse_expandable_segments
from stable_opd_mcore.serving.api_key import read_api_key
from tests.train.runs import tiny_config


def refusal(function, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return str(caught.value)


def errors(config, place=None) -> list[str]:
    return [each.title for each in check_config(config, place).errors]


def test_keys_of_servers_are_read_before_the_start(tmp_path):
    (tmp_path / "open").write_text("key")
    (tmp_path / "open").chmod(0o644)
    urls = ["http://127.0.0.1:9"]
    servers = {"placement": "external", "urls": urls, "api_key_file": str(tmp_path / "absent")}
    config = tiny_config(
        tmp_path,
        "keys",
        rollout={"engine": "sglang", "sglang": servers},
        fault={"watchdog_minutes": 60},
        teacher={"engine": "sglang", "urls": urls, "api_key_file": str(tmp_path / "open")},
    )
    files = (tmp_path / "absent", tmp_path / "open")
    assert {refusal(read_api_key, file) for file in files} <= {*errors(config)}


def test_rollouts_to_replay_are_looked_for_before_the_start(tmp_path):
    rollout = {"engine": "replay", "replay_from": str(tmp_path / "other")}
    config = tiny_config(tmp_path, "again", rollout=rollout)
    message = refusal(replay_engine, config)
    assert "step 1 was not stored" in message
    assert message in errors(config)


@pytest.mark.parametrize(("package", "value"), [("wandb", True), ("mlflow", "sqlite:///m.db")])
def test_an_absent_tracker_is_refused_before_the_start(package, value, tmp_path, monkeypatch):
    monkeypatch.setattr("stable_opd_mcore.inputs.loading.find_spec", lambda _: None)
    config = tiny_config(tmp_path, "tracked", monitoring={package: value})
    assert str(missing_tracker(package)) in errors(config)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_colocated_servers_cannot_read_is_refused(name, tmp_path, monkeypatch):
    rollout = {"engine": "sglang", "sglang": {"placement": "colocated"}}
    fault = {"watchdog_minutes": 60}
    config = tiny_config(tmp_path, "colocated", rollout=rollout, fault=fault)
    on_gpu, on_cpu = (Place(Cluster(1, 1), gpu) for gpu in ("h200", "cpu"))
    monkeypatch.setenv(name, "backend:native")
    refuse_expandable_segments(config)
    monkeypatch.setenv(name, "garbage_collection_threshold:0.8,expandable_segments:True")
    message = refusal(refuse_expandable_segments, config)
    assert message.endswith(f"remove expandable_segments: unset {name}")
    assert message in errors(config, on_gpu)
    assert message not in errors(config, on_cpu)
    refuse_expandable_segments(tiny_config(tmp_path, "embedded"))
