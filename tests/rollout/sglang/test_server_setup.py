"""How the run's servers start: their options and the directory they read."""

import json
from pathlib import Path

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.placement.topology import sends_adapter
from stable_opd_mcore.rollout.sglang.server_setup import (
    model_config,
    refuse_unbuildable_kernels,
    server_options,
    write_model_config,
)
from stable_opd_mcore.serving.command import server_environment
from stable_opd_mcore.serving.process import ServerOptions
from stable_opd_mcore.serving.requests import UNUSED_POSITIONS
from tests.config.cases import run_with
from tests.models import tiny
from tests.train.runs import tiny_architecture


@pytest.fixture
def model(tmp_path):
    return write_model_config(tiny.architecture("qwen2"), tmp_path)


def options_of(model: Path, sglang: dict, number: int = 0, **train) -> ServerOptions:
    config = run_with(rollout={"engine": "sglang", "sglang": sglang}, train=train)
    return server_options(config, model, number, (2, 3), 2, "cuda")


def test_a_server_has_its_own_port_and_its_own_gpus(model):
    """Port 0 stays 0: each server takes a free one."""
    assert [options_of(model, {"port": 30000}, number).port for number in range(3)] == [
        30000,
        30001,
        30002,
    ]
    assert [options_of(model, {}, number).port for number in range(2)] == [0, 0]
    options = options_of(model, {"host": "0.0.0.0", "arguments": ["--log-level", "info"]})
    assert (options.gpus, options.tensor, options.host) == ((2, 3), 2, "0.0.0.0")
    assert options.arguments == ("--log-level", "info")
    assert options.dummy_weights


def test_only_colocated_servers_release_their_memory(model):
    colocated, others = options_of(model, {"placement": "colocated"}), options_of(model, {})
    assert (colocated.memory_saver, others.memory_saver) == (True, False)
    assert 0 < colocated.memory_share < 1
    assert others.memory_share is None


@pytest.mark.parametrize(
    ("family", "lora", "device", "expected"),
    [
        ("qwen2", None, "cuda", "--enable-lora --max-lora-rank 8"),
        ("qwen2", None, "cpu", "--lora-backend torch_native"),
        ("qwen2", "merged", "cuda", ""),
        ("qwen3_moe", None, "cuda", ""),
    ],
)
def test_servers_are_ready_for_the_factors_that_they_will_be_sent(
    tmp_path, family, lora, device, expected
):
    fields = tiny.config(family, intermediate_size=96)
    config = run_with(
        student={"architecture": fields, "lora": {"rank": 8}},
        rollout={"engine": "sglang", "sglang": {"lora": lora}},
    )
    model = write_model_config(read_architecture(fields), tmp_path)
    arguments = " ".join(server_options(config, model, 0, (), 1, device).arguments)
    assert expected in arguments
    modules = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    assert (f"--lora-target-modules {modules} " in arguments) == bool(expected)
    teacher = server_options(config, model, 0, (), 1, device, dummy_weights=False)
    assert teacher.arguments == ()
    if device == "cpu":
        with pytest.raises(UserError, match=r"width 96 to a multiple of 64.*lora=merged"):
            server_options(config, model, 0, (), 2, device)


def test_gpt_oss_is_served_in_the_layout_that_is_verified_and_on_a_cpu_by_plain_attention(tmp_path):
    model = write_model_config(tiny.architecture("gpt_oss"), tmp_path)
    config = run_with(rollout={"engine": "sglang"})

    def arguments(device: str, is_student: bool) -> str:
        options = server_options(config, model, 0, (), 1, device, dummy_weights=is_student)
        return " ".join(options.arguments)

    assert arguments("cuda", True) == "--moe-runner-backend triton"
    assert arguments("cuda", False) == ""
    for is_student in (True, False):
        plain = "--attention-backend intel_amx --disable-hybrid-swa-memory"
        assert arguments("cpu", is_student) == plain


def test_a_draft_reads_its_own_files_and_survives_released_memory(tmp_path):
    """The student starts with random weights; its publishes do not reach the draft."""
    draft = tmp_path / "draft"
    draft.mkdir()
    student = tiny.architecture("qwen2")
    sizes = {"hidden_size": student.hidden_size, "vocab_size": student.vocab_size}
    of_eagle = {"architectures": ["LlamaForCausalLMEagle3"], **sizes}
    (draft / "config.json").write_text(json.dumps(of_eagle))
    (draft / "pytorch_model.bin").touch()
    model = write_model_config(student, tmp_path / "model")
    settings = {"algorithm": "eagle3", "draft": str(draft), "steps": 5, "top_k": 4, "tokens": 16}

    def arguments(**sglang) -> str:
        options = options_of(model, {"speculative": settings} | sglang)
        variable = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
        assert server_environment(options, "", {})[variable] == "1"
        return " ".join(options.arguments)

    expected = (
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {draft} "
        "--speculative-draft-load-format auto --speculative-num-steps 5 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    )
    assert arguments() == expected
    assert arguments(placement="colocated") == f"{expected} --enable-draft-weights-cpu-backup"
    with pytest.raises(UserError, match="speculative on a CPU"):
        server_options(
            run_with(rollout={"engine": "sglang", "sglang": {"speculative": settings}}),
            *(model, 0, (), 1, "cpu"),
        )


@pytest.mark.parametrize(
    ("family", "reason"),
    [("qwen3_moe", "experts with an adapter"), ("qwen3_5", "decay and step size of gated delta")],
)
def test_what_sglang_does_not_serve_as_an_adapter_is_sent_merged(family, reason):
    student = read_architecture(tiny.config(family))
    settings = {"student": {"architecture": {}, "lora": {}}}
    assert not sends_adapter(run_with(rollout={"engine": "sglang"}, **settings), student)
    config = run_with(rollout={"engine": "sglang", "sglang": {"lora": "adapter"}}, **settings)
    with pytest.raises(UserError, match=rf"{reason}.*rollout\.sglang\.lora=merged"):
        sends_adapter(config, student)


def test_a_model_directory_names_the_class_that_sglang_loads(tmp_path):
    fields = tiny.config("qwen2")
    path = write_model_config(read_architecture(fields), tmp_path / "new" / "model")
    assert [file.name for file in path.iterdir()] == ["config.json"]
    written = json.loads((path / "config.json").read_text())
    assert written == fields | {
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": None,
        "max_position_embeddings": fields["max_position_embeddings"] + UNUSED_POSITIONS,
    }
    named = read_architecture(fields | {"architectures": ["Qwen2Special"]})
    write_model_config(named, path)  # a second run of the same name
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen2Special"]


def test_a_model_with_other_parts_is_served_by_its_decoder():
    nested = read_architecture(tiny.config("qwen3_5", tie_word_embeddings=True))
    fields = model_config(nested)
    assert fields["architectures"] == ["Qwen3_5ForCausalLM"]
    assert fields["full_attention_interval"] == 4
    served = read_architecture(fields)
    assert (served.model_type, served.tied) == ("qwen3_5_text", True)
    assert served.max_positions == nested.max_positions + UNUSED_POSITIONS
    text = read_architecture(tiny.config("qwen3_vl"))
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    wanted = tiny.config("qwen3") | {"rope_parameters": plain, "eos_token_id": None}
    wanted |= {"max_position_embeddings": text.max_positions + UNUSED_POSITIONS}
    assert model_config(text) == {"architectures": ["Qwen3ForCausalLM"], **wanted}
    irregular = ["full_attention", "linear_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"only models with attention in every n-th layer"):
        model_config(read_architecture(tiny.config("qwen3_5", layer_types=irregular)))


def test_groups_of_experts_are_stated_for_a_router_without_groups():
    """SGLang's DeepSeek-V2 needs both numbers. A config.json of transformers may lack them."""
    fields = tiny.config("deepseek_v2")
    assert fields.keys().isdisjoint({"n_group", "topk_group"})
    served = model_config(read_architecture(fields))
    assert (served["n_group"], served["topk_group"]) == (1, 1)


def test_servers_know_no_stop_id_but_those_of_a_request():
    """Absent, it would be 2 for a Llama, by transformers' default."""
    fields = tiny_architecture(32, 2, eos_token_id=20)
    assert model_config(read_architecture(fields))["eos_token_id"] is None


def test_servers_that_could_not_start_are_refused_before_models_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    python = tmp_path / "python"

    def config(**sglang):
        return run_with(rollout={"engine": "sglang", "sglang": {"python": str(python)} | sglang})

    with pytest.raises(UserError, match="no such interpreter"):
        refuse_unbuildable_kernels(config())
    for name in ("python", "ninja", "c++"):
        (tmp_path / name).touch(0o755)
    with pytest.raises(UserError, match=r"without nvcc in .* set CUDA_HOME") as refused:
        refuse_unbuildable_kernels(config())
    assert "\n" not in str(refused.value)
    assert "curand.h" not in str(refused.value)
    with pytest.raises(UserError, match=r"curand\.h in .*/include: install .* set CPATH"):
        refuse_unbuildable_kernels(config(speculative={"algorithm": "mtp"}))
    refuse_unbuildable_kernels(config(placement="external", urls=["http://n1:9"]))
    refuse_unbuildable_kernels(run_with())
