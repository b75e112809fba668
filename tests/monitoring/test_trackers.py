"""TensorBoard and the trackers, each with the real library and without a network.

The packages of the extra `trackers` (400 MB) are not in the development environment; without
them their tests are skipped. CI does not install them.
"""

import importlib.util
import json
import sys
import time

import pytest

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Mean, Metrics
from stable_opd_mcore.monitoring.metric_sinks import MetricSinks
from stable_opd_mcore.monitoring.trackers import MlflowSink, SwanlabSink, TrackioSink, WandbSink
from tests.commands.report.make_run import config

HAS_WANDB = importlib.util.find_spec("wandb") is not None
HAS_TRACKIO = importlib.util.find_spec("trackio") is not None
HAS_SWANLAB = importlib.util.find_spec("swanlab") is not None
HAS_MLFLOW = all(importlib.util.find_spec(name) for name in ("mlflow", "sqlalchemy", "alembic"))


def write(directory, settings: Config, steps, first_step=0):
    with MetricSinks(directory, settings, first_step) as sinks:
        for step in steps:
            sinks.write(step, Metrics({"loss/pg": Mean(step, 1), "kl/reference": Mean(0, 0)}))


def test_tensorboard_has_every_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, config(), range(4))
    write(tmp_path, config(), range(2, 5), first_step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss/pg"]
    found = [(event.step, event.value) for event in events.Scalars("loss/pg")]
    assert found == [(step, float(step)) for step in range(5)]


@pytest.mark.parametrize(
    ("package", "settings", "off"),
    [
        ("wandb", {"wandb": True}, "monitoring.wandb=false"),
        ("trackio", {"trackio": True}, "monitoring.trackio=false"),
        ("swanlab", {"swanlab": True}, "monitoring.swanlab=false"),
        ("mlflow", {"mlflow": "http://localhost:1"}, "monitoring.mlflow=null"),
    ],
)
def test_a_missing_package_is_refused_with_its_remedy(
    tmp_path, monkeypatch, package, settings, off
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"the {package} package.*\[trackers\]', or set {off}"):
        MetricSinks(tmp_path, config(monitoring={"tensorboard": False, **settings}), first_step=0)
    key, _, value = off.removeprefix("monitoring.").partition("=")
    without = config(monitoring={"tensorboard": False, key: json.loads(value)})
    with MetricSinks(tmp_path, without, first_step=0):
        pass


@pytest.mark.skipif(not HAS_WANDB, reason="needs wandb")
def test_wandb_keeps_project_entity_tags_and_the_run_over_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, value in {"PROJECT": "p", "ENTITY": "e", "TAGS": "x,y"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    settings = config(monitoring={"tensorboard": False, "wandb": True})
    write(tmp_path, settings, range(3))
    first = (tmp_path / "wandb_id").read_text().strip()
    (file,) = (tmp_path / "wandb").glob(f"offline-run-*-{first}/*.wandb")
    deadline = time.monotonic() + 60
    while b"loss/pg" not in file.read_bytes():  # wandb's own process writes it a little later
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert b"kl/reference" not in file.read_bytes()
    sink = WandbSink(tmp_path, settings)  # wandb may lose what one process logs in a second run
    run = sink._run
    assert (run.project, run.entity, run.tags, run.name) == ("p", "e", ("x", "y"), "a-run")
    assert run.config["student"]["path"] == "somewhere"
    assert run.id == first
    sink.close()


@pytest.mark.skipif(not HAS_TRACKIO, reason="needs trackio")
def test_trackio_keeps_settings_project_and_the_run_over_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    monkeypatch.setenv("TRACKIO_PROJECT", "p")
    settings = config(monitoring={"tensorboard": False, "trackio": True})
    write(tmp_path, settings, range(3))
    write(tmp_path, settings, range(2, 4), first_step=2)
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("p")
    assert run == f"a-run-{(tmp_path / 'trackio_id').read_text().strip()}"
    found = SQLiteStorage.get_logs("p", run)
    assert [(row["step"], row["loss/pg"]) for row in found] == [(n, n) for n in (0, 1, 2, 2, 3)]
    assert not any("kl/reference" in row for row in found)
    kept = SQLiteStorage.get_run_config("p", run)
    assert kept is not None
    assert kept["student"]["path"] == "somewhere"
    monkeypatch.setenv("TRACKIO_SERVER_URL", "nonsense")
    with pytest.raises(UserError, match=r"Trackio refuses the run: .*monitoring.trackio=false"):
        TrackioSink(tmp_path, settings)


@pytest.mark.skipif(not HAS_SWANLAB, reason="needs swanlab")
def test_swanlab_keeps_settings_and_the_run_over_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "account"))  # none is logged in
    settings = config(monitoring={"tensorboard": False, "swanlab": True})
    monkeypatch.setenv("SWANLAB_MODE", "online")
    with pytest.raises(UserError, match=r"SwanLab refuses the run: .*SWANLAB_MODE=offline"):
        SwanlabSink(tmp_path, settings)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    write(tmp_path, settings, range(3))
    write(tmp_path, settings, range(2, 4), first_step=2)
    name = (tmp_path / "swanlab_id").read_text().strip()
    files = list((tmp_path / "swanlab").glob(f"run-*-{name}/run-{name}.swanlab"))
    assert files
    for file in files:  # one a start, or one for both in the same second
        assert b"loss/pg" in file.read_bytes()
        assert b"kl/reference" not in file.read_bytes()
        assert "path: somewhere" in (file.parent / "files" / "config.yaml").read_text()


@pytest.mark.skipif(not HAS_MLFLOW, reason="needs mlflow, sqlalchemy and alembic")
def test_mlflow_keeps_settings_steps_and_the_run_over_a_resume(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    address = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "an experiment")
    settings = config(monitoring={"tensorboard": False, "mlflow": address})
    write(tmp_path, settings, range(3))
    write(tmp_path, settings, range(2, 4), first_step=2)
    client = MlflowClient(tracking_uri=address)
    name = (tmp_path / "mlflow_id").read_text().strip()
    run = client.get_run(name)
    assert run.info.run_name == "a-run"
    assert run.info.status == "FINISHED"
    assert run.data.params["student.path"] == "somewhere"
    assert client.get_experiment(run.info.experiment_id).name == "an experiment"
    found = [(m.step, m.value) for m in client.get_metric_history(name, "loss/pg")]
    assert sorted(set(found)) == [(step, float(step)) for step in range(4)]
    assert client.get_metric_history(name, "kl/reference") == []
    with pytest.raises(UserError, match="Give the address of a server"):
        MlflowSink(tmp_path / "other", config(monitoring={"mlflow": "nonsense://x"}))
