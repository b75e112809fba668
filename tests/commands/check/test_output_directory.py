"""A run directory that is locked, was trained with other settings, or cannot hold the run."""

import json
import os
import shutil
import time
from collections import namedtuple
from contextlib import nullcontext

import pytest

from stable_opd_mcore.commands.check import output_directory
from stable_opd_mcore.config.load import save_config
from stable_opd_mcore.errors import ConfigError, UserError
from stable_opd_mcore.host.run_lock import LOCK_FILE, RunLock
from stable_opd_mcore.inputs.hashes import refuse_changed_base, write_inputs
from stable_opd_mcore.inputs.run_inputs import RunInputs
from tests.commands.check.directories import write_model
from tests.models import tiny
from tests.train.runs import tiny_config


def inputs_of(tmp_path, accept_changes=False, **sections):
    return RunInputs(tiny_config(tmp_path, "run", **sections), None, accept_changes)


def trained(tmp_path, **sections):
    save_config(tiny_config(tmp_path, "run", **sections), tmp_path / "run/config.resolved.yaml")
    (tmp_path / "run" / "checkpoints" / "step_000001").mkdir(parents=True)


def test_changed_settings_are_refused_unless_accepted(tmp_path):
    trained(tmp_path)
    assert list(output_directory.other_settings(inputs_of(tmp_path))) == []
    changed = {"optimizer": {"lr": 2e-3}, "kl": {"beta": 0.2}}
    with pytest.raises(ConfigError) as caught:
        list(output_directory.other_settings(inputs_of(tmp_path, **changed)))
    for part in ("optimizer.lr: 0.001 -> 0.002", "kl.beta: 0.1 -> 0.2", "run.name", "--accept-ch"):
        assert part in str(caught.value)
    accepted = list(
        output_directory.other_settings(inputs_of(tmp_path, accept_changes=True, **changed))
    )
    assert [(f.severity, f.values) for f in accepted] == [
        ("note", (("before", "0.1"), ("now", "0.2"))),
        ("note", (("before", "0.001"), ("now", "0.002"))),
    ]


def test_checkpoints_of_unknown_settings_are_refused_unless_accepted(tmp_path):
    trained(tmp_path)
    (tmp_path / "run" / "config.resolved.yaml").unlink()
    with pytest.raises(ConfigError, match=r"has checkpoints but no config\.resolved\.yaml"):
        list(output_directory.other_settings(inputs_of(tmp_path)))
    assert list(output_directory.other_settings(inputs_of(tmp_path, accept_changes=True))) == []


def test_changed_files_of_data_teacher_and_reference_are_refused_unless_accepted(tmp_path):
    rows, teacher = tmp_path / "rows.jsonl", tmp_path / "teacher"
    teacher.mkdir()
    weights = teacher / "model.safetensors"
    rows.write_text('{"problem": "1+1"}')
    weights.write_bytes(bytes(70 * 2**20))  # too large to be hashed whole
    sections = {
        "data": {"train": {"path": str(rows)}},
        "teacher": {"path": str(teacher), "architecture": None},
        "student": {"path": str(teacher), "architecture": None},
        "tokenizer": {"path": "synthetic"},
    }
    trained(tmp_path, **sections)
    assert (
        list(output_directory.other_settings(inputs_of(tmp_path, **sections))) == []
    )  # the form before 0.2
    write_inputs(inputs_of(tmp_path, **sections).config)
    for path in (rows, weights):
        os.utime(path, (1, 1))
    assert list(output_directory.other_settings(inputs_of(tmp_path, **sections))) == []
    rows.write_text('{"problem": "1+2"}')
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    (teacher / "more.json").write_text("{}")
    with pytest.raises(ConfigError, match="absent -> 2 bytes") as caught:
        list(output_directory.other_settings(inputs_of(tmp_path, **sections)))
    for key, path in (("data.train", rows), ("teacher", weights), ("student", weights)):
        assert f"contents of {key}.path={path}: {path.stat().st_size} bytes" in str(caught.value)
    accepted = output_directory.other_settings(inputs_of(tmp_path, accept_changes=True, **sections))
    assert len(list(accepted)) == 5
    moved = {**sections, "data": {"train": {"path": str(shutil.copy(rows, tmp_path / "b.jsonl"))}}}
    with pytest.raises(ConfigError) as caught:
        list(output_directory.other_settings(inputs_of(tmp_path, **moved)))
    assert "data.train.path: " in str(caught.value)
    assert "contents of data.train" not in str(caught.value)


@pytest.mark.parametrize("key", ["student", "tokenizer"])
@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_changed_files_of_the_tokenizer_are_refused(tmp_path, key, name):
    path = write_model(tmp_path / "model")
    sections = {"kl": {"beta": 0.0}, key: {"path": path}}
    if key == "student":
        sections |= {"tokenizer": {"path": None}, key: {"path": path, "architecture": None}}
    trained(tmp_path, **sections)
    inputs = inputs_of(tmp_path, **sections)
    write_inputs(inputs.config)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")  # read at the start only
    assert list(output_directory.other_settings(inputs)) == []
    (tmp_path / "model" / name).write_text("{}")
    with pytest.raises(ConfigError, match=rf"contents of tokenizer={path}/{name}: \d+ bytes"):
        list(output_directory.other_settings(inputs))
    inputs.config.run.files.inputs.write_text("{}")  # of a run before tokenizers were stored
    assert list(output_directory.other_settings(inputs)) == []


@pytest.mark.parametrize(("family", "is_refused"), [("qwen3_5", True), ("qwen3", False)])
def test_a_base_that_an_export_copies_from_must_stay_as_it_was(tmp_path, family, is_refused):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(tiny.config(family)))
    (base / "model.safetensors").write_bytes(b"mtp")
    student = {"architecture": None, "path": str(base)}
    config = inputs_of(tmp_path, student=student, kl={"beta": 0.0}).config
    write_inputs(config)
    refuse_changed_base(config)
    (base / "model.safetensors").write_bytes(b"MTP")
    changed = rf"not written: .* \(contents of student.path={base}/model.safetensors\).* restore"
    with pytest.raises(UserError, match=changed) if is_refused else nullcontext():
        refuse_changed_base(config)
    shutil.rmtree(base)
    refuse_changed_base(config)  # the export itself refuses a base that is absent


def test_a_run_without_checkpoints_starts_anew(tmp_path):
    trained(tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert list(output_directory.other_settings(inputs_of(tmp_path, optimizer={"lr": 2e-3}))) == []


def test_a_living_holder_is_refused_in_the_words_of_train(tmp_path):
    assert list(output_directory.other_run(inputs_of(tmp_path))) == []
    with RunLock(tmp_path / "run"):
        with pytest.raises(UserError) as by_check:
            list(output_directory.other_run(inputs_of(tmp_path)))
        with pytest.raises(UserError) as by_train, RunLock(tmp_path / "run"):
            pass
    assert str(by_check.value) == str(by_train.value)


def test_a_holder_on_another_machine_may_live(tmp_path):
    path = tmp_path / "run" / LOCK_FILE
    path.parent.mkdir()
    path.write_text("filelock/2\npid=7\nhost=another\nmode=lease\ntoken=x\nduration=60.0\n")
    (finding,) = output_directory.other_run(inputs_of(tmp_path))
    assert finding.severity == "warning"
    os.utime(path, (time.time() - 100,) * 2)
    assert list(output_directory.other_run(inputs_of(tmp_path))) == []


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    config = tiny_config(tmp_path / "runs", "bad")
    with pytest.raises(UserError, match=r"runs/bad: cannot be written: \[Errno 20\] Not a direct"):
        output_directory.writable(RunInputs(config, None))
    output_directory.writable(inputs_of(tmp_path))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("free", "severity"), [(10**9, None), (700_000, "warning"), (9, "error")])
def test_too_little_space_is_found(free, severity, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(free)
    monkeypatch.setattr(output_directory.shutil, "disk_usage", lambda path: usage)
    found = list(output_directory.disk(inputs_of(tmp_path)))
    assert [finding.severity for finding in found] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("policy", "every", "found"), [("act", 100, 1), ("act", 20, 0), ("warn", 100, 0)]
)
def test_a_guard_that_acts_needs_checkpoints_to_return_to(policy, every, found, tmp_path):
    sections = {"guard": {"policy": policy}, "checkpoint": {"every": every}}
    findings = list(output_directory.rare_checkpoints(inputs_of(tmp_path, **sections)))
    assert len(findings) == found
    assert all("before step 110" in str(each) for each in findings)


def test_the_space_of_a_run_is_that_of_its_checkpoints_and_model(tmp_path, monkeypatch):
    monkeypatch.setattr(output_directory, "GIB", 1)
    monkeypatch.setattr(
        output_directory.shutil, "disk_usage", lambda path: namedtuple("u", "free")(0)
    )
    parameters = 20448
    for precision, model, checkpoint in (("fp32", 4, 12), ("bf16", 2, 14)):
        sections = {"train": {"precision": precision}, "checkpoint": {"keep": 2}}
        (finding,) = output_directory.disk(inputs_of(tmp_path, **sections))
        needed = parameters * (model + 3 * checkpoint)
        assert finding.values == (("needed", f"{needed:.1f} GiB"), ("free", "0.0 GiB"))
    guarded = {
        "guard": {"policy": "act", "max_lambda": 0.0},
        "checkpoint": {"keep": 2, "every": 10},
    }
    (finding,) = output_directory.disk(inputs_of(tmp_path, **guarded))
    needed = parameters * (4 + 6 * 12)  # it keeps up to three more
    assert finding.values[0] == ("needed", f"{needed:.1f} GiB")
    factors = 2 * 1024  # of rank 2
    lora = {"student": {"lora": {"rank": 2}}, "checkpoint": {"keep": 2}}
    (finding,) = output_directory.disk(inputs_of(tmp_path, **lora))
    needed = 4 * (parameters + factors) + 3 * 12 * factors  # the adapter is exported as well
    assert finding.values[0] == ("needed", f"{needed:.1f} GiB")
    for step in (1, 2):  # two of three are there
        (tmp_path / "run" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    (finding,) = output_directory.disk(inputs_of(tmp_path))
    assert finding.values[0] == ("needed", f"{parameters * 16:.1f} GiB")
