"""Every layout gives the numbers of one rank: for each kind of student, with all weights trained or
low-rank factors; also where layouts compute the common beginning of rollouts once.

A run makes each step on another layout, resumed from the last one. So a row shows the rollouts, the
update and the checkpoint of its layouts, and the exported model that of the last. Any two of
student, training and layout meet in some run; the model itself: tests/parallel/test_pipeline.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.token_files import VALUES, TokenText, read_tokens
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.tensors import hf_shapes
from stable_opd_mcore.train.samples import overlap
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.train.runs import (
    ALONE,
    OBJECTIVES,
    REWARDS,
    metrics_of,
    objective_of_each_source,
    tiny_architecture,
    tiny_config,
)

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {  # data parallelism takes what is left of two or four ranks
    "dp": {},
    "tp2": {"tensor": 2},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "tp2_pp2": {"tensor": 2, "pipeline": 2},
    "tp2_sp_cp2": {"tensor": 2, "context": 2, "sequence": True},
    "pp2_cp2": {"pipeline": 2, "context": 2},
    "pp2_vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "cp2": {"context": 2},
    "ep2": {"expert": 2},
    "ep4_tp2": {"expert": 4, "tensor": 2, "sequence": True},
    "ep2_tp2": {"expert": 2, "tensor": 2, "sequence": True},
    "ep2_pp2": {"expert": 2, "pipeline": 2},
    "cp2_ep2": {"context": 2, "expert": 2},
}
DENSE, TEACHER = tiny_architecture(16, 4), tiny_architecture(24, 4)
EXPERTS: dict[str, Any] = {"head_dim": 8, "num_experts_per_tok": 2}
MIXTURE = tiny_architecture(
    16,
    2,
    model_type="qwen3_moe",
    num_experts=8,
    moe_intermediate_size=12,
    norm_topk_prob=True,
    **EXPERTS,
)
SINKS = tiny_architecture(
    16,
    2,
    model_type="gpt_oss",
    num_local_experts=8,
    intermediate_size=12,
    sliding_window=5,
    rope_parameters={"rope_type": "default"},
    **EXPERTS,
)
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
AIR = tiny_architecture(  # GLM-4.5-Air's kind
    16, 4, model_type="glm4_moe", attention_bias=True, head_dim=8, **ROUTED
)
LATENTS = tiny_architecture(  # Moonlight's kind
    16,
    2,
    model_type="deepseek_v3",
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=6,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=5,
    n_group=4,
    topk_group=2,
    **ROUTED,
)
SIZES: dict[str, Any] = {"vocab_size": 27, "num_attention_heads": 2, "rms_norm_eps": 1e-5}
HYBRID, HYBRID_EXPERTS, SHARED_EXPERT, WINDOWS = (
    tiny.config(family, **SIZES) for family in ("qwen3_5", "qwen3_next", "qwen3_5_moe", "gemma3")
)
ROLLOUT = {"prompts_per_step": 5, "samples_per_prompt": 1}  # unequal shares of ranks
LORA = {"lora": {"rank": 4, "alpha": 8.0, "expert_rank": 2}}
SOME = {"lora": {"rank": 4, "alpha": 8.0, "rslora": True, "matrices": ["q_proj", "v_proj"]}}
STACKED = {"lora": LORA["lora"] | {"rslora": True, "matrices": ["v_proj", "gate_up_proj"]}}
FAST = {"optimizer": {"lr": 1e-2, "warmup_steps": 0}}  # factors B begin at 0


@dataclass(frozen=True)
class Case:
    """A run through some of LAYOUTS, with a step on each; on one layout with two."""

    ranks: int
    student: dict[str, Any]
    layouts: tuple[str, ...]
    factors: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = False  # layouts have train.share_prefixes, one rank has not

    @property
    def steps(self) -> int:
        return max(2, len(self.layouts))

    @property
    def rounding(self) -> float:
        """Larger where delta nets normalise keys."""
        return 1e-3 if "layer_types" in str(self.student) else 1e-4


OFFLOADED = {"memory": {"offload": ["frozen"]}}  # it changes no number
MOVING = {"reference": {"update": "every", "every": 1}}
AHEAD = {"rollout": {"max_staleness": 1, "partial": True}}
ARITHMETIC = "synthetic:arithmetic"
PAIRS = {"rollout": {"prompts_per_step": 3, "samples_per_prompt": 2}}
SOURCES = {  # the second has no golden solutions
    "data": {
        "train": [
            {"path": ARITHMETIC, "name": "long", "options": {"min_operations": 4, "rows": 32}},
            {
                "path": ARITHMETIC,
                "weight": 3,
                "reward": {"function": f"{REWARDS}:quarter"},
                "columns": {"solution": None},
            },
        ]
    },
    "normaliser": "per_source",
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 2},
}
EACH = objective_of_each_source()
WIDE, DEEP = tiny_architecture(32, 4), tiny_architecture(16, 8, tie_word_embeddings=True)
# Two teachers share an objective, a third and an adapter of the first have another, and one source
# asks no teacher.
SEVERAL = {
    "data": {
        "train": [
            {"path": ARITHMETIC, "name": name, "options": {"rows": 32, "seed": 9 - seed}} | own
            for seed, (name, own) in enumerate(
                {
                    "wide": {"teacher": "wide", "objective": {"name": "gkd"}},
                    "first": {"objective": {"name": "gkd"}},
                    "deep": {"teacher": "deep"},
                    "tuned": {"teacher": "tuned"},
                    "none": {"objective": {"name": "grpo"}},
                }.items()
            )
        ]
    },
    "normaliser": "per_source",
    "sampling": {"temperature": 0.8, "max_new_tokens": 8},
    "teacher": {
        "models": {
            "wide": {"architecture": WIDE},
            "deep": {"architecture": DEEP},
            "tuned": {"adapter": "adapter"},  # in the directory of the runs
        }
    },
    "rollout": {"prompts_per_step": 10, "samples_per_prompt": 2},
}
CASES = {
    "dense": Case(4, DENSE, ("tp2_sp_cp2", "tp2_pp2", "pp2_cp2"), sections=OFFLOADED),
    "experts": Case(4, MIXTURE, ("cp2_ep2", "ep2_pp2")),
    "sinks": Case(4, SINKS, ("ep2_tp2", "ep2_pp2"), sections=PAIRS, shares=True),
    "latents": Case(4, LATENTS, ("cp2_ep2", "ep2_tp2")),
    "hybrid": Case(2, HYBRID, ("tp2_sp", "pp2_vpp2")),
    "hybrid_experts": Case(4, HYBRID_EXPERTS, ("ep4_tp2", "ep2_pp2")),
    "dense_factors": Case(2, DENSE, ("pp2_vpp2", "cp2", "tp2"), LORA, FAST),
    "moving_reference": Case(2, WINDOWS, ("tp2_sp", "cp2"), SOME, FAST | MOVING),
    "factors_of_experts": Case(2, AIR, ("ep2", "tp2_sp", "pp2_vpp2"), LORA, FAST),
    "factors_of_latents": Case(
        2, LATENTS | {"q_lora_rank": 6}, ("ep2", "tp2_sp"), LORA, FAST | PAIRS, shares=True
    ),
    "factors_of_windows": Case(2, WINDOWS, ("tp2_sp", "pp2_vpp2"), LORA, FAST | PAIRS, shares=True),
    "factors_of_stacked_experts": Case(4, SINKS, ("ep2_tp2", "ep2_pp2"), STACKED, FAST),
    "factors_of_shared_expert": Case(4, SHARED_EXPERT, ("ep4_tp2", "ep2_pp2"), LORA, FAST),
    "ahead": Case(4, AIR, ("cp2_ep2",), sections=AHEAD),
    "teacher_of_experts": Case(
        2, tiny_architecture(16, 2), ("ep2",), sections={"teacher": {"architecture": MIXTURE}}
    ),
    "several_sources": Case(2, DENSE, ("dp",), sections=SOURCES, shares=True),
    "objectives": Case(2, DENSE, ("tp2_sp", "cp2", "pp2_vpp2"), sections=EACH),
    "several_teachers": Case(4, DENSE, ("tp2_sp_cp2", "tp2_pp2"), sections=SEVERAL),
}
GROUPS = {"prompts_per_step": 8, "samples_per_prompt": 4}  # of the runs with rewards


def config_of(directory: Path, name: str, case: Case, steps: int, **sections: Any) -> Config:
    """Five short responses a step."""
    layers = case.student.get("text_config", case.student)["num_hidden_layers"]
    given: dict[str, Any] = {
        "student": {"architecture": case.student, **case.factors},
        "sampling": {"max_new_tokens": 8},
        **case.sections,
        "teacher": {"architecture": TEACHER | {"num_hidden_layers": layers}}
        | case.sections.get("teacher", {}),
        "rollout": ROLLOUT | case.sections.get("rollout", {}),
        "train": {
            "steps": steps,
            "micro_batch_tokens": 96,
            "recompute": "full",
            "share_prefixes": case.shares and "parallel" in sections,
        },
    }
    if "models" in given["teacher"]:
        tuned = {"tuned": {"adapter": str(directory / "adapter")}}
        given["teacher"]["models"] = given["teacher"]["models"] | tuned
    return tiny_config(directory, name, **given | sections)


def grpo_config(directory: Path, name: str, rollout: Any, **sections: Any) -> Config:
    """Rewards differ within groups, and ratios of the second update are not 1."""
    return tiny_config(
        directory,
        name,
        objective={"name": "grpo"},
        aggregation="token_mean",  # the loss is then not zero, for any rewards
        reward={"function": f"{REWARDS}:by_length"},
        rollout=rollout,
        train={"steps": 2, "minibatches": 2},
        **ALONE,
        **sections,
    )


def on_one_rank(rank: int, world_size: int, directory: str) -> None:
    path, overlap.EVERY = Path(directory), 1
    for place in (path / "adapter", path / "one_rank" / "adapter"):
        tiny.write_adapter(place, read_architecture(TEACHER))
    for name, case in CASES.items():
        train(config_of(path / "one_rank", name, case, case.steps), show_progress=False)
    train(grpo_config(path, "grpo", GROUPS), show_progress=False)


def on_layouts(rank: int, world_size: int, directory: str) -> None:
    """The cases of as many ranks, each step resumed from the last one."""
    path, overlap.EVERY = Path(directory), 1
    for name, case in CASES.items():
        first = case.steps - len(case.layouts) + 1
        for steps, layout in enumerate(case.layouts, start=first):
            if case.ranks == world_size:
                config = config_of(path, name, case, steps, parallel=LAYOUTS[layout])
                train(config, show_progress=False)
    if world_size == 2:
        replay = GROUPS | {"engine": "replay", "replay_from": f"{path}/grpo"}
        train(grpo_config(path, "grpo_on_two", replay, parallel=LAYOUTS["cp2"]), False)
        in_bf16(path)


BF16 = {"hybrid": "tp2_sp", "dense_factors": "dp"}


def in_bf16(directory: Path) -> None:
    for name, layout in BF16.items():
        for run, steps in (("whole", 2), ("resumed", 1), ("resumed", 2)):
            sections = {"train": {"steps": steps, "precision": "bf16"}}
            parallel = LAYOUTS[layout]
            config = config_of(
                directory / run, name, CASES[name], steps, parallel=parallel, **sections
            )
            train(config, show_progress=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, on_one_rank, str(directory))
    for ranks in (2, 4):
        run_ranks(ranks, on_layouts, str(directory))
    return directory


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_loads_are_those_of_one_rank(runs, name):
    case, expected, found = (
        CASES[name],
        metrics_of(runs / "one_rank" / name),
        metrics_of(runs / name),
    )
    assert [row["step"] for row in found] == list(range(1, case.steps + 1))
    keys = ["loss/total", "loss/pg", "loss/kl", "loss/sft", "grad_norm"]
    keys += [key for key in expected[0] if key.startswith(("overlap/", "stop/", "moe/"))]
    assert ("moe/load_max_over_mean" in keys) == ("experts" in str(case.student))
    for key in keys:
        wanted = [row[key] for row in expected]
        assert [row[key] for row in found] == pytest.approx(wanted, case.rounding, 1e-6), key
    assert 0 < expected[0]["overlap/ratio"] < 1
    gaps = ([row["logprob/rollout_gap_max"] for row in rows] for rows in (found, expected))
    assert next(gaps) == pytest.approx(next(gaps), abs=case.rounding)
    assert expected[0]["loss/kl"] == 0  # to the student itself, or to it without factors
    assert (abs(expected[1]["loss/kl"]) < 1e-6) == (name == "moving_reference")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.factors])
def test_the_merged_model_is_that_of_one_rank(runs, name):
    own, other = (
        load_file(at / name / "model/model.safetensors") for at in (runs, runs / "one_rank")
    )
    assert own.keys() == other.keys()
    rounding = CASES[name].rounding
    for key, tensor in own.items():
        torch.testing.assert_close(other[key], tensor, rtol=10 * rounding, atol=rounding)


def test_values_of_tokens_are_those_of_one_rank(runs):
    expected, found = tokens_of(runs / "one_rank" / "dense"), tokens_of(runs / "dense")
    assert len(expected) == ROLLOUT["prompts_per_step"] * CASES["dense"].steps
    assert set(expected[-1].values) == set(VALUES)
    for one, other in zip(expected, found, strict=True):
        assert (one.prompt_id, one.sample_index) == (other.prompt_id, other.sample_index)
        assert one.pieces == other.pieces
        for key in VALUES:  # the student is the reference in the first step: no KL, no values
            zeros = [0.0] * len(one.pieces)
            values = other.values.get(key, zeros)
            assert values == pytest.approx(one.values.get(key, zeros), rel=1e-2, abs=1e-4)


def tokens_of(run: Path) -> list[TokenText]:
    files = sorted(RunDirectory(run).tokens(1).parent.iterdir())
    return [one for file in files for one in read_tokens(file)]


def test_loads_are_of_all_experts(runs):
    for row in metrics_of(runs / "one_rank" / "experts"):
        assert 1 < row["moe/load_max_over_mean"] <= 4  # 2 of 8 experts are chosen
        assert 0 <= row["moe/unused_experts"] <= 6


def test_sources_are_sampled_weighed_and_measured(runs):
    on_one_rank, on_two = (metrics_of(at / "several_sources") for at in (runs / "one_rank", runs))
    for one, other in zip(on_one_rank, on_two, strict=True):
        assert one["source/long/row_share"] == 0.25
        assert one["source/synthetic_arithmetic_train/accuracy"] == 0.25
        assert one["source/long/weight_share"] == pytest.approx(0.25)
        assert one["source/long/token_share"] == other["source/long/token_share"]
        kl = {key: one[f"source/{key}/kl"] for key in ("long", "synthetic_arithmetic_train")}
        assert min(kl.values()) < one["kl/teacher"] < max(kl.values())


def test_each_source_trains_by_its_objective(runs):
    on_one_rank, on_two = (metrics_of(at / "objectives") for at in (runs / "one_rank", runs))
    for one, other in zip(on_one_rank, on_two, strict=True):
        assert 0 < one["teacher_prompt/given_share"] < 1
        assert one["source/rewarded/kl"] is one["source/golden/kl"] is None  # nobody scores them
        for key in ("kl/teacher", "source/both/kl", "source/taught/kl", "advantage/mean"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
        assert other["teacher_prompt/tokens_mean"] == one["teacher_prompt/tokens_mean"]
        shares = [[row[f"source/{s}/weight_share"] for s in OBJECTIVES] for row in (one, other)]
        assert shares[0] == shares[1]
        assert sum(shares[0]) == pytest.approx(1)


def test_grpo_under_context_parallelism_gives_the_same_losses_and_gradients(runs):
    one_rank, other = metrics_of(runs / "grpo"), metrics_of(runs / "grpo_on_two")
    assert all(row["advantage/abs_sum_regular"] > 10 for row in one_rank)
    for key in ("loss/total", "loss/pg", "loss/kl", "grad_norm", "advantage/abs_sum_regular"):
        expected = [row[key] for row in one_rank]
        assert [row[key] for row in other] == pytest.approx(expected, rel=1e-4, abs=1e-6), key


def test_a_resume_in_bf16_is_exact_and_decay_rates_stay_in_fp32(runs):
    for name in BF16:
        rows = metrics_of(runs / "whole" / name)
        assert metrics_of(runs / "resumed" / name) == rows
        assert rows[0]["loss/total"] != rows[1]["loss/total"]
    whole, resumed = (
        load_file(runs / run / "hybrid" / "model/model.safetensors") for run in ("whole", "resumed")
    )
    assert whole.keys() == resumed.keys() == hf_shapes(tiny.architecture("qwen3_5")).keys()
    for name, tensor in whole.items():
        in_fp32 = name.endswith((".A_log", ".linear_attn.norm.weight"))
        assert tensor.dtype == (torch.float32 if in_fp32 else torch.bfloat16), name
        assert torch.equal(tensor, resumed[name]), name
        if name.endswith(".A_log"):
            assert not torch.equal(tensor, tensor.bfloat16().float())
    pairs, others = (
        load_file(runs / run / "dense_factors" / "adapter/adapter_model.safetensors")
        for run in ("whole", "resumed")
    )
    assert all(torch.equal(tensor, others[key]) for key, tensor in pairs.items())
