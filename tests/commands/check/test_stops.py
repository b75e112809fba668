"""The stop class is the loss's; stop tokens that differ or contradict each other are found."""

import json
from dataclasses import replace

import pytest

from stable_opd_mcore.commands.check.stops import (
    different_stops,
    ignored_generation_settings,
    stop_class,
    two_special_tokens,
    unread_stops,
)
from stable_opd_mcore.inputs.pair import Pair, read_model
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.losses.stop_tokens import shared_stop_ids
from tests.commands.check.directories import TEMPLATE, findings, the, write_model
from tests.train.runs import tiny_config

PLAIN_TURNS = TEMPLATE.replace("<|im_end|>", "")


def pair(tmp_path, **teacher):
    student = read_model("student", write_model(tmp_path / "student"))
    other = read_model("teacher", write_model(tmp_path / "teacher", **teacher))
    return Pair(student, other, shared_stop_ids(student.stop_ids, other.stop_ids))


def test_the_class_is_the_one_that_the_loss_merges(tmp_path):
    read = pair(tmp_path, eos_token_id=259)
    assert read.merged_stops == shared_stop_ids((258, 256), (258, 259, 256)) == (256, 258, 259)
    assert stop_class(read) == [
        "student stops on 258 '<|im_end|>' (chat template), "
        "256 '<|endoftext|>' (generation_config.json, config.json, tokenizer)",
        "teacher stops on 258 '<|im_end|>' (chat template), "
        "259 '<|box_start|>' (generation_config.json, config.json), "
        "256 '<|endoftext|>' (tokenizer)",
        "stop class: the loss compares p(256 + 258 + 259), one outcome for both models",
    ]
    assert stop_class(replace(read, merged_stops=()))[-1].startswith("stop class: none")
    assert list(different_stops(read)) == []
    (finding,) = different_stops(replace(read, merged_stops=()))
    assert (finding.severity, finding.subject) == ("warning", "stop tokens")
    assert finding.remedy == "objective.stop_class=true"


def test_a_template_that_contradicts_the_eos_of_one_model_is_found(tmp_path):
    found = findings(tmp_path, {}, {"template": PLAIN_TURNS})
    finding = the(found, "ends turns with another token than its EOS")
    assert finding.title.startswith("the student's chat template")
    assert finding.severity == "warning"
    assert finding.values == (
        ("chat template", "258 '<|im_end|>'"),
        ("generation_config.json, config.json, tokenizer", "256 '<|endoftext|>'"),
    )


def test_a_contradiction_that_both_models_share_is_none(tmp_path):
    assert findings(tmp_path, {}, {}) == []


@pytest.mark.parametrize(
    ("key", "other", "eos_id", "number"),
    [
        ("eos_token", "<|endoftext|>", None, 0),  # the same one
        (
            "eos_token",
            "<|box_start|>",
            256,
            0,
        ),  # config.json names the first, so both end responses
        ("eos_token", "<|box_start|>", None, 1),
        ("bos_token", "<|box_start|>", 256, 1),
    ],
)
def test_a_special_token_that_two_files_name_differently_is_found(
    key, other, eos_id, number, tmp_path
):
    path = write_model(tmp_path, bos="<s>", eos_token_id=eos_id)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({key: {"content": other}}))
    found = list(two_special_tokens(Pair(read_model("student", path), None, ())))
    assert len(found) == number
    assert all(finding.values[1][1] == repr(other) for finding in found)


def test_generation_settings_that_sampling_does_not_follow_are_noted(tmp_path):
    path = write_model(tmp_path)
    neutral = {"eos_token_id": 256, "do_sample": True, "temperature": 1.0, "_from_model_config": 1}
    other = {"temperature": 0.7, "top_p": 0, "min_p": 0, "suppress_tokens": [7]}
    said = "temperature=0.7, top_p=0, suppress_tokens=[7]"
    for settings, expected in ((neutral, []), (neutral | other, [("note", said)])):
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        read = Pair(read_model("student", path), None, ())
        found = list(ignored_generation_settings(read))
        assert [(f.severity, f.values[0][1]) for f in found] == expected


@pytest.mark.parametrize(
    ("eos", "own_ids", "found"),
    [(259, None, ["259 '<|box_start|>'"]), (259, [258], []), (256, None, [])],
)
def test_stop_ids_of_a_student_whose_tokenizer_is_elsewhere_are_found(
    eos, own_ids, found, tmp_path
):
    student = write_model(tmp_path / "student", eos_token_id=eos)
    config = tiny_config(
        tmp_path,
        "run",
        student={"path": student, "architecture": None, "stop_token_ids": own_ids},
        tokenizer={"path": write_model(tmp_path / "tokenizer")},
        teacher={"path": write_model(tmp_path / "teacher"), "architecture": None},
    )
    findings = unread_stops(RunInputs(config, None).pair)
    assert [each.values[0][1] for each in findings] == found
