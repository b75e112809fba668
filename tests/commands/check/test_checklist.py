"""The whole list: real pairs, hostile files, a config with several faults."""

import inspect
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stable_opd_mcore.commands.check import checklist
from stable_opd_mcore.commands.check.checklist import (
    check_config,
    check_file,
    check_models,
    check_pair,
    refuse_errors,
)
from stable_opd_mcore.commands.check.finding import Finding
from stable_opd_mcore.commands.check.printing import Report
from stable_opd_mcore.commands.plan.plan import Cluster
from stable_opd_mcore.config.load import load_config, save_config
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.inputs.pair import ModelFiles, read_model
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.tensors import hf_shapes
from tests.commands.check.directories import the, write_model
from tests.hub_server import COMMIT, hub_server, use_hub
from tests.real_data import real_data
from tests.train.runs import ALONE, tiny_config

END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
QWEN, R1 = "tokenizers/Qwen2.5-Math-1.5B", "tokenizers/DeepSeek-R1-Distill-Qwen"


@pytest.fixture(scope="module")
def qwen() -> ModelFiles:
    return read_model("student", str(real_data(QWEN)))


def test_qwen_math_with_r1_distill(qwen, tmp_path):
    for file in real_data(R1).iterdir():  # config_1.5B.json is its published config.json
        shutil.copy(file, tmp_path / file.name.replace("config_1.5B", "config"))
    report = check_models(qwen, read_model("teacher", str(tmp_path)))
    found = list(report.findings)
    values = {
        token_id: dict(the(found, f"id {token_id} means different tokens").values)
        for token_id in (151643, 151644, 151645, 151648)
    }
    assert values == {
        151643: {"student": "'<|endoftext|>'", "teacher": f"'{END}'"},
        151644: {"student": "'<|im_start|>'", "teacher": "'<\uff5cUser\uff5c>'"},
        151645: {"student": "'<|im_end|>'", "teacher": "'<\uff5cAssistant\uff5c>'"},
        151648: {"student": "'<|box_start|>'", "teacher": "'<think>'"},
    }  # fmt: skip
    assert the(found, "prompts begin with different tokens (BOS)").values == (
        ("student", "none"),
        ("teacher", "151646 '<\uff5cbegin\u2581of\u2581sentence\uff5c>'"),
    )
    eos = the(found, "the student's chat template ends turns with another token than its EOS")
    assert [value for _, value in eos.values] == ["151645 '<|im_end|>'", "151643 '<|endoftext|>'"]
    assert the(found, "<think> is not the same tokens in both models")
    assert "the loss compares p(151643 + 151645), one outcome for both models" in report.facts[-1]
    assert not report.errors
    text = report.text()
    assert "<|im_start|>user" in text
    assert "<\uff5cUser\uff5c>1+1" in text
    (_, student), (_, teacher) = report.prompts
    assert "\n(31 tokens; special: 151644 '<|im_start|>', 151645 '<|im_end|>')" in student
    assert "special: 151646 '<\uff5cbegin" in teacher


def test_qwen_math_with_itself_has_no_finding(qwen):
    assert check_models(qwen, read_model("teacher", str(real_data(QWEN)))).findings == ()


def damaged(directory: Path, name: str, content: bytes | None) -> str:
    write_model(directory)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    return str(directory)


HOSTILE = {  # other damage of a JSON file: tests/host/test_json_files.py
    "no tokenizer": ("tokenizer.json", None, "no tokenizer.json in it"),
    "broken JSON": ("tokenizer.json", b'{"version": ', "not valid JSON"),
    "a list": ("tokenizer_config.json", b"[]", "a JSON list, not an object"),
    "broken settings": ("config.json", b"{]", "config.json: not valid JSON"),
    "an EOS outside the vocabulary": (
        "generation_config.json",
        b'{"eos_token_id": 10000000000}',
        "are outside the vocabulary",
    ),
    "a huge file": ("generation_config.json", b" " * (17 * 2**20), "more than 16 MiB"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_error(case, tmp_path):
    name, content, words = HOSTILE[case]
    teacher = damaged(tmp_path / "teacher", name, content)
    (finding,) = check_pair(write_model(tmp_path / "student"), teacher).findings
    assert (finding.severity, finding.subject) == ("error", "files")
    assert words in finding.title
    assert teacher in finding.title
    assert len(finding.title) < 1000


def test_both_directories_are_read_though_one_is_absent(tmp_path):
    student, teacher = str(tmp_path / "a"), damaged(tmp_path / "b", "tokenizer.json", b"")
    first, second = check_pair(student, teacher).findings
    assert student in first.title
    assert teacher in second.title


def test_settings_and_weights_of_a_pair_of_directories_are_checked(tmp_path):
    student = write_model(tmp_path / "student", use_bias=False)
    teacher = write_model(tmp_path / "teacher", model_type="glm4", use_bias=False)  # may be served
    unread = check_pair(student, teacher).findings
    assert [each.values[0] for each in unread] == [("student", "use_bias=False")]
    (tmp_path / "student" / "model.safetensors").write_bytes(b"")
    (error,) = check_pair(student, teacher).errors
    assert "model.safetensors: not readable, probably truncated (0 bytes)" in error.title
    write_model(tmp_path / "student", is_causal=False)
    (error,) = check_pair(student, teacher).errors
    assert "is_causal=False is not supported" in error.title


def test_a_directory_without_settings_is_said(tmp_path):
    teacher = damaged(tmp_path / "teacher", "config.json", None)
    (finding,) = check_pair(write_model(tmp_path / "student"), teacher).findings
    assert (finding.severity, finding.title) == ("note", f"{teacher} has no config.json")


def test_a_good_config_has_no_finding(tmp_path):
    report = check_config(tiny_config(tmp_path, "run", sampling={"max_new_tokens": 64}), None)
    assert report.findings == ()
    assert "student stops on 20 '$' (chat template, tokenizer)" in report.facts
    refuse_errors(report)
    shipped = load_config("configs/smoke_cpu.yaml", [f"run.directory={tmp_path}"])
    assert check_config(shipped, None).findings == ()


def test_a_run_without_a_teacher_has_no_finding_on_pairs(tmp_path):
    config = tiny_config(tmp_path, "run", objective={"name": "grpo"}, **ALONE)
    report = check_config(config, None)
    assert report.findings == ()
    assert report.facts[0].startswith("student  inline architecture")
    assert not [fact for fact in report.facts if "teacher" in fact or "stop class" in fact]


def test_a_teacher_of_whom_only_the_address_is_known_is_said(tmp_path):
    served = {"engine": "sglang", "urls": ["http://n1:1"], "architecture": None}
    config = tiny_config(tmp_path, "run", teacher=served, sampling={"max_new_tokens": 64})
    (finding,) = check_config(config, None).findings
    assert (finding.severity, finding.title) == ("warning", "the teacher's tokenizer is not known")
    assert finding.values[0] == ("teacher", "teacher.path is null")


def test_a_named_teacher_is_compared_as_the_teacher_is(tmp_path):
    places = {"first": {}, "second": {"template": "{{ messages[0]['content'] }}", "bos": "<s>"}}
    paths = {name: write_model(tmp_path / name, **own) for name, own in places.items()}
    one = {"path": paths["first"], "architecture": None}
    sources = [{"path": "synthetic:arithmetic", "name": n, "teacher": t} for n, t in
               (("a", None), ("b", "code"))]  # fmt: skip
    teacher = one | {"models": {"code": {"path": paths["second"]}}}
    config = tiny_config(tmp_path, "run", student=one, tokenizer={"path": None}, teacher=teacher,
                         data={"train": sources})  # fmt: skip
    report = check_config(config, None)
    found = [each for each in report.findings if "teacher.models" in each.subject]
    assert "chat template of teacher.models.code" in {each.subject for each in found}
    assert the(found, "render").values[0][0] == "student"
    assert any(fact.startswith("teacher.models.code: teacher stops on") for fact in report.facts)
    assert not [each for each in report.findings if each.subject == "chat template"]


def test_a_config_that_cannot_be_loaded_is_one_error(tmp_path):
    (tmp_path / "bad.yaml").write_text("run: {name: x, title: y}\n")
    cluster = Cluster(1, 8)
    assert len(check_file(tmp_path / "bad.yaml", [], cluster).errors) == 1
    hot = ["sampling.temperature=0.7", "teacher.engine=sglang", "teacher.urls=[http://n1:1]"]
    (error,) = check_file(Path("configs/smoke_cpu.yaml"), hot, cluster).findings
    assert "sampling.temperature=0.7 with teacher.engine=sglang" in error.title


def test_a_config_in_fp32_is_checked_for_a_cpu_unless_a_gpu_is_named(tmp_path):
    settings = [f"run.directory={tmp_path}"]
    arguments = (Path("configs/smoke_cpu.yaml"), settings, Cluster(1, 2))
    assert "software on a CPU: " in check_file(*arguments).facts[-1]
    facts = check_file(*arguments, "h100").facts
    assert "of a h100" in facts[-2]
    assert "software on a GPU: " in facts[-1]


def test_hub_ids_are_checked_as_the_directories_that_train_downloads(tmp_path, monkeypatch):
    tensors = hf_shapes(read_architecture(write_model(tmp_path / "model")))
    weights = {name: torch.zeros(shape) for name, shape in tensors.items()}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    student = {"path": "me/model", "architecture": None, "revision": COMMIT}
    teacher = student | {"path": "me/absent"}
    config = tiny_config(
        tmp_path, "run", student=student, teacher=teacher, tokenizer={"path": None}
    )
    save_config(config, tmp_path / "config.yaml")
    with hub_server({"models/me/model": files}) as (url, _):
        use_hub(monkeypatch, url, tmp_path / "cache")
        (error,) = check_file(tmp_path / "config.yaml", [], Cluster(1, 1), "cpu").errors
        assert error.title.startswith(f"me/absent: cannot be downloaded at revision {COMMIT}")
        there = ["teacher.path=me/model"]
        assert not check_file(tmp_path / "config.yaml", there, Cluster(1, 1), "cpu").errors


def test_a_model_that_is_absent_is_one_error(tmp_path):
    student = {"path": str(tmp_path / "absent"), "architecture": None}
    config = tiny_config(tmp_path, "run", student=student, tokenizer={"path": None})
    (error,) = check_config(config, None).errors
    assert error.title.startswith(f"student.path={tmp_path}/absent is absent; expected a model")


def test_the_shown_prompt_is_that_of_the_first_problem_with_the_system_prompt(tmp_path):
    path = write_model(tmp_path / "model")
    settings = {"path": path, "architecture": None}
    (tmp_path / "rows.jsonl").write_text('{"problem": "2+3", "answer": "5"}\n' * 8)
    data = {"train": {"path": str(tmp_path / "rows.jsonl")}, "system_prompt": "Be brief."}
    config = tiny_config(tmp_path, "run", student=settings, tokenizer={"path": None}, data=data,
                         objective={"name": "grpo"}, **ALONE)  # fmt: skip
    ((role, prompt),) = check_config(config, None).prompts
    assert role == "student"
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+3<|im")
    assert "; special: 257 '<|im_start|>', 258 '<|im_end|>')" in prompt


def test_every_fault_of_a_config_is_found_at_once(tmp_path):
    config = tiny_config(
        tmp_path,
        "run",
        sampling={"max_new_tokens": 128, "top_p": 0.5},
        parallel={"tensor": 4},
        data={"train": {"path": str(tmp_path / "absent.jsonl")}},
    )
    report = check_config(config, None)
    subjects = {finding.subject: finding.severity for finding in report.findings}
    assert subjects == {
        "window": "error",
        "sampling": "warning",
        "layout": "error",
        "data": "error",
    }
    with pytest.raises(ConfigError) as caught:
        refuse_errors(report)
    for words in ("found 4 errors", "absent.jsonl: no such file", "parallel.tensor=4", "window"):
        assert words in str(caught.value)
    assert "top_p" not in str(caught.value)


def test_the_cold_start_s_data_are_checked_too(tmp_path):
    row = {"problem": "1+1", "answer": "2"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    config = tiny_config(
        tmp_path,
        "run",
        cold_start={"steps": 1, "lr": 1e-3, "prompts_per_step": 4},
        mixture={"lambda": 0},
        data={"train": {"path": str(tmp_path / "rows.jsonl")}},
    )
    (finding,) = check_config(config, None).errors
    assert "no golden solution, which sft" in finding.title


def test_one_refusal_keeps_its_own_words():
    with pytest.raises(ConfigError, match=r"^fix a$"):
        refuse_errors(Report((Finding("error", "data", "fix a"),)))


def test_the_list_names_every_check_once():
    of_pairs = checklist.OF_A_PAIR, checklist.OF_A_DIRECTORY
    subjects = *of_pairs, checklist.OF_A_RUN, checklist.OF_THE_SOFTWARE
    listed = [check for checks in subjects for each in checks.values() for check in each]
    modules = {sys.modules[check.__module__] for check in listed}
    written = {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_")
        and function.__module__ == module.__name__
        and function.__annotations__["return"] in (None, Iterator[Finding])
    }
    assert written == set(listed)
    assert len(listed) == len(written) > 30
