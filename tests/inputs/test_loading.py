"""What a run reads before its models: the teacher's stop ids, prompts, the vocabulary's size."""

import json
from pathlib import Path

import pytest

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.downloads import with_downloads
from stable_opd_mcore.inputs.loading import (
    configured_architecture,
    load_sources,
    load_teacher_tokenizer,
    load_tokenizer,
    named_teacher_stops,
    refuse_prefixes_of_delta_nets,
    refuse_routing_without_experts,
    refuse_small_vocabulary,
    refuse_unused_expert_ranks,
    teacher_stop_ids,
)
from tests.commands.check.directories import TEMPLATE, write_model
from tests.hub_server import COMMIT, hub_server, use_hub
from tests.models import tiny
from tests.train.runs import tiny_architecture, tiny_config


def test_a_teacher_without_a_tokenizer_stops_as_the_student_or_as_its_section_says(tmp_path):
    config = tiny_config(tmp_path, "run")
    tokenizer = load_tokenizer(config)
    assert load_teacher_tokenizer(config) is None
    assert teacher_stop_ids(config, tokenizer) == tokenizer.stop_token_ids == (20,)
    given = tiny_config(tmp_path, "run", teacher={"stop_token_ids": [21]})
    assert teacher_stop_ids(given, tokenizer) == (21,)
    without = tiny_config(tmp_path, "run", teacher=None, objective={"name": "sft"}, kl={"beta": 0})
    assert teacher_stop_ids(without, tokenizer) is None


def test_a_teacher_with_a_tokenizer_stops_on_its_own_ids(tmp_path):
    Tokenizer.load("synthetic", stop_token_ids=(21,)).save(tmp_path / "teacher")
    (tmp_path / "teacher" / "generation_config.json").write_text('{"eos_token_id": [20, 21]}')
    teacher = {"path": str(tmp_path / "teacher"), "architecture": None}
    config = tiny_config(tmp_path, "run", teacher=teacher)
    assert teacher_stop_ids(config, load_tokenizer(config)) == (20, 21)


def test_window_and_rope_theta_of_the_settings_replace_those_of_the_model(tmp_path):
    changes = {"window": 256, "rope_theta": 40000.0}
    config = tiny_config(tmp_path, "run", student=changes, teacher={"window": 512})
    student = configured_architecture(config.student)
    assert (student.max_positions, student.rotary.theta) == (256, 40000.0)
    assert configured_architecture(config.teacher).max_positions == 512
    assert configured_architecture(config.teacher).rotary.theta == 10000.0


def test_hub_ids_are_downloaded_at_their_commit_without_code(tmp_path, monkeypatch):
    Tokenizer.load("synthetic").save(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    wanted = files | {
        "config.json": json.dumps(tiny_architecture(32, 2)).encode(),
        "model.safetensors": b"weights",
    }
    others = {"modeling.py": b"code", "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}
    student = {"path": "me/model", "architecture": None, "revision": COMMIT}
    config = tiny_config(tmp_path, "run", student=student, tokenizer={"path": None})
    with hub_server({"models/me/model": wanted | others}) as (url, _):
        use_hub(monkeypatch, url, tmp_path / "cache")
        local = with_downloads(config)
    folder = Path(local.student.path)
    assert {path.name for path in folder.iterdir()} == wanted.keys()
    assert load_tokenizer(local).encode("1+1") == Tokenizer.load("synthetic").encode("1+1")
    assert configured_architecture(local.student).num_layers == 2
    assert local.teacher == config.teacher
    assert with_downloads(local) == local


def test_a_path_that_is_no_model_directory_is_refused_with_what_is_expected(tmp_path):
    (tmp_path / "file").write_text("")
    wrong = {"file": "is a file", "absent": "is absent", ".": "has no config.json"}
    for name, what in wrong.items():
        teacher = {"path": f"{tmp_path}/{name}", "architecture": None}
        expected = rf"teacher\.path=\S+ {what}; expected a model directory .*teacher\.revision"
        with pytest.raises(UserError, match=expected):
            with_downloads(tiny_config(tmp_path, "run", teacher=teacher))
    (tmp_path / "config.json").write_text("{}")
    assert with_downloads(tiny_config(tmp_path, "run", teacher=teacher))


def test_another_chat_template_of_a_teacher_does_not_write_its_own_prompts(tmp_path):
    paths = [write_model(tmp_path / "a"), write_model(tmp_path / "b", template=TEMPLATE + "!")]
    same, other = ({"path": path, "architecture": None} for path in paths)

    def stops(**more):
        sources = [{"path": "synthetic:arithmetic", "name": name} for name in ("a", "b")]
        sections = {"teacher": same | {"models": {"other": other}} | more}
        sections["data"] = {"train": [sources[0] | {"teacher": "other"}, sources[1]]}
        config = tiny_config(tmp_path, "run", tokenizer={"path": paths[0]}, **sections)
        tokenizer = load_tokenizer(config)
        return named_teacher_stops(config, tokenizer, tokenizer)

    with pytest.raises(UserError, match=r"models\.other has another .*: drop teacher\.prompt, or"):
        stops(prompt="{{ problem }}")
    assert stops() == {"other": (258, 256)}


def test_a_hub_id_needs_its_commit(tmp_path):
    student = {"path": "me/model", "architecture": None}
    with pytest.raises(UserError, match=r"student\.path=me/model: .*student\.revision to a com"):
        with_downloads(tiny_config(tmp_path, "run", student=student))
    with pytest.raises(UserError, match=r"student\.revision"):
        tiny_config(tmp_path, "run", student=student | {"revision": "main"})


def test_an_embedding_smaller_than_the_vocabulary_is_refused(tmp_path):
    config = tiny_config(tmp_path, "run", student={"architecture": tiny_architecture(32, 2)})
    architecture = configured_architecture(config.student)
    refuse_small_vocabulary(config.student.path, architecture, 27)
    with pytest.raises(UserError, match=r"vocab_size=27 has no row for .* largest id, 27"):
        refuse_small_vocabulary(config.student.path, architecture, 28)


def test_a_tokenizer_with_other_ids_than_the_students_own_is_refused(tmp_path):
    student, same, other = (
        write_model(tmp_path / name, **mutation)
        for name, mutation in (
            ("student", {}),
            ("same", {"rename": {"<|im_start|>": "<user>"}}),
            ("other", {"swap": ("3", "4")}),
        )
    )
    settings = {"student": {"path": student, "architecture": None}}
    assert load_tokenizer(tiny_config(tmp_path, "run", **settings, tokenizer={"path": same}))
    swapped = tiny_config(tmp_path, "run", **settings, tokenizer={"path": other})
    with pytest.raises(UserError, match=rf"{other} and {student} .* id 18 is '4' .* tokenizer.pa"):
        load_tokenizer(swapped)
    (tmp_path / "student" / "tokenizer.json").write_text("{}")  # tokenizer.path replaces it
    assert load_tokenizer(swapped)


def test_expert_ranks_without_experts_are_refused(tmp_path):
    config = tiny_config(tmp_path, "run", parallel={"expert": 2})
    with pytest.raises(UserError, match=r"parallel.expert=2: qwen2 and qwen2 have no experts"):
        refuse_unused_expert_ranks(config, configured_architecture(config.student))
    alone = config.replaced(parallel={"expert": 1})
    refuse_unused_expert_ranks(alone, configured_architecture(config.student))
    mixture = {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1}
    teacher = tiny_architecture(32, 2, moe_intermediate_size=8, **mixture)
    taught = tiny_config(tmp_path, "run", parallel={"expert": 2}, teacher={"architecture": teacher})
    refuse_unused_expert_ranks(taught, configured_architecture(taught.student))


def test_replaying_a_routing_that_does_not_exist_is_refused(tmp_path):
    replayed = {"engine": "sglang", "routing_replay": True}
    config = tiny_config(tmp_path, "run", rollout=replayed)
    message = r"rollout.routing_replay=true: the student \(qwen2\) has no experts"
    with pytest.raises(UserError, match=message):
        refuse_routing_without_experts(config, configured_architecture(config.student))
    without = config.replaced(rollout={"routing_replay": False})
    refuse_routing_without_experts(without, configured_architecture(config.student))


def test_prefixes_of_a_delta_net_are_not_shared(tmp_path):
    teacher = {"architecture": tiny.config("qwen3_5")}
    config = tiny_config(tmp_path, "run", teacher=teacher, train={"share_prefixes": True})
    student = configured_architecture(config.student)
    with pytest.raises(UserError, match=r"a gated delta net of this qwen3_5.*: set it to false"):
        refuse_prefixes_of_delta_nets(config, student)
    refuse_prefixes_of_delta_nets(config.replaced(train={"share_prefixes": False}), student)


def test_sources_follow_each_other_and_a_list_of_one_is_that_source(tmp_path):
    def rows(train):
        return load_sources(tiny_config(tmp_path, "run", data={"train": train}))

    one = {"path": "synthetic:arithmetic", "options": {"rows": 3}}
    assert rows([one]) == rows(one)
    both = rows([one | {"name": "a"}, one])
    assert [row.row_id for row in both[:4]] == [
        *(f"a:{k}" for k in range(3)),
        "synthetic:arithmetic/train:0",
    ]
    assert [row.problem for row in both[:3]] == [row.problem for row in both[3:]]
    with pytest.raises(UserError, match="two sources are named synthetic:arithmetic/train; give"):
        rows([one, one])
