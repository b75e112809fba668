"""Windows, rotary base, nucleus and embedding rows of a config."""

import json

import pytest

from stable_opd_mcore.commands.check import sampling
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.run_inputs import RunInputs
from tests.train.runs import ALONE, tiny_architecture, tiny_config


def inputs_of(tmp_path, **sections):
    return RunInputs(tiny_config(tmp_path, "run", **sections), None)


def long_student(**fields):
    return {"architecture": tiny_architecture(32, 4, max_position_embeddings=16384, **fields)}


LONG = {"max_new_tokens": 8192}
CASES = {  # check, sections -> severity and the two values
    "the student's window": (sampling.student_window, {"sampling": {"max_new_tokens": 128}},
     ("error", "128 (rope_theta 10000)", "128")),
    "the teacher's window": (sampling.teacher_window, {"sampling": {"max_new_tokens": 126}},
     ("error", "128", "130")),
    "a raised window": (sampling.rotary_base, {"student": long_student(), "sampling": LONG},
     ("warning", "16384 (rope_theta 10000)", "8192")),
    "a nucleus": (sampling.nucleus, {"sampling": {"top_p": 0.9}},
     ("warning", "0.9", "the full softmax, top_p 1")),
    "a learning rate of full training with low-rank factors": (sampling.slow_factors,
     {"student": {"lora": {}}, "optimizer": {"lr": 1e-6}},
     ("warning", "1e-06", "3e-05 or more, ten times the rate of a full training")),
    "factors that are rounded as they are published": (sampling.rounded_factors,
     {"student": {"lora": {"rank": 8}}, "rollout": {"engine": "sglang",
      "sglang": {"lora": "merged"}}, "train": {"precision": "bf16"},
      "fault": {"watchdog_minutes": None}}, ("note", "rank 8", "bf16")),
    "groups of several weights": (sampling.mixed_groups,
     {"rollout": {"max_staleness": 1, "partial": True, "samples_per_prompt": 4},
      "objective": {"name": "grpo"}, **ALONE}, ("warning", "true", "4")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_setting_that_does_not_fit_is_found(case, tmp_path):
    check, sections, (severity, *values) = CASES[case]
    (finding,) = check(inputs_of(tmp_path, **sections))
    assert finding.severity == severity
    assert [value for _, value in finding.values] == values


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"rollout": {"max_staleness": 1, "partial": True}},
        {"student": long_student(rope_theta=40000.0), "sampling": LONG},
        {"student": long_student(), "sampling": {"max_new_tokens": 2048}},
        {"sampling": {"top_p": 0.9}, "objective": {"name": "lsm"}},  # its paper's setting
    ],
)
def test_settings_that_fit_give_no_finding(sections, tmp_path):
    for check in (
        sampling.student_window,
        sampling.rotary_base,
        sampling.nucleus,
        sampling.mixed_groups,
    ):
        assert list(check(inputs_of(tmp_path, **sections))) == []
    if not sections:
        assert list(sampling.teacher_window(inputs_of(tmp_path))) == []


def test_the_teacher_s_window_holds_exactly_what_it_says(tmp_path):
    exact = inputs_of(tmp_path, sampling={"max_new_tokens": 124})  # and a prompt of 4 tokens
    assert list(sampling.teacher_window(exact)) == []
    served = {"engine": "sglang", "urls": ["http://n1:1"], "architecture": None}
    assert list(sampling.teacher_window(inputs_of(tmp_path, teacher=served))) == []
    Tokenizer.load("synthetic").save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_architecture(32, 4)))
    served["path"] = str(tmp_path)  # servers leave seven positions unused
    for tokens, findings in ((117, 0), (118, 1)):
        fits = inputs_of(tmp_path, teacher=served, sampling={"max_new_tokens": tokens})
        assert len(list(sampling.teacher_window(fits))) == findings
    (tmp_path / "game.py").write_text("def episode(row, seed):\n    yield None\n")
    episodes = {"environment": {"function": f"{tmp_path}/game.py:episode"}}  # as long as the window
    assert list(sampling.teacher_window(inputs_of(tmp_path, **episodes))) == []
    (found,) = sampling.teacher_window(inputs_of(tmp_path, teacher=served, **episodes))
    assert [value for _, value in found.values] == ["121", "128"]
    assert (
        list(sampling.teacher_window(inputs_of(tmp_path, objective={"name": "grpo"}, **ALONE)))
        == []
    )


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_an_embedding_with_too_few_rows_is_refused_as_train_refuses_it(role, tmp_path):
    small = {"architecture": tiny_architecture(32, 4, vocab_size=23)}
    with pytest.raises(UserError, match=r"vocab_size=23 has no row for .* largest id, 23"):
        sampling.embedding_rows(inputs_of(tmp_path, **{role: small}))


def test_a_support_beyond_the_vocabulary_is_refused_as_train_refuses_it(tmp_path):
    with pytest.raises(UserError, match=r"objective\.top_k=32 exceeds the tokenizer's 24 tokens"):
        sampling.support(inputs_of(tmp_path, objective={"name": "lsm", "top_k": 32}))
    assert sampling.support(inputs_of(tmp_path, objective={"name": "lsm", "top_k": 24})) is None
    assert sampling.support(inputs_of(tmp_path)) is None
