"""What FP8 changes in the numbers of a run: log-probabilities, advantages, KL to the reference.

    .venv/bin/python -m benchmarks.fp8 [--demo runs/demo/seed0]
    .venv/bin/python -m benchmarks.fp8 --smoke   # one pair, one recipe, tiny: does it run?

The emulation (docs/fp8.md) in the teacher only, in the reference only, and in all three models.
Pairs of random weights have the architectures of real families at a tiny size; --demo adds the
trained pair of `make demo`. Responses to arithmetic problems are sampled once, by the student
without FP8. The student is its reference with noise of 5 % of the weights, or in the demo the
model that the arm `stable_opd` wrote.

On stdout a Markdown table of means over the sampled tokens, in nats:
  log p       |log p - log p without FP8| of teacher, of reference, or of the student in "all three"
  advantage   |A - A without FP8|, A = log p_teacher - log p_student, and its share of the mean |A|
  signs       tokens whose advantage changes its sign
  KL          |KL - KL without FP8| of KL(student || reference), and the error of the mean KL
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.config.schema import Config, ModelConfig, ParallelConfig
from stable_opd_mcore.config.training import Fp8, Fp8Recipe, Fp8Role
from stable_opd_mcore.inputs.loading import (
    configured_architecture,
    load_prompts,
    load_tokenizer,
    teacher_stop_ids,
)
from stable_opd_mcore.losses.source_objectives import build_source_objectives
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, output_head
from stable_opd_mcore.models.layers.attention import PackedSequences
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.rollout.build_engine import training_sampling
from stable_opd_mcore.rollout.embedded import EmbeddedEngine
from stable_opd_mcore.train.run_models import load_model

PROMPTS = 48
FAMILIES = ("qwen2", "llama", "qwen3", "qwen3_moe")
NOISE = 0.05
Setting = dict[Fp8Role, Fp8Recipe]
SETTINGS: dict[tuple[str, str], Setting] = {
    ("teacher", "tensorwise"): {"teacher": "tensorwise"},
    ("teacher", "blockwise"): {"teacher": "blockwise"},
    ("reference", "tensorwise"): {"reference": "tensorwise"},
    ("reference", "blockwise"): {"reference": "blockwise"},
    ("all three", "tensorwise"): dict.fromkeys(("student", "teacher", "reference"), "tensorwise"),
    ("all three", "blockwise"): dict.fromkeys(("student", "teacher", "reference"), "blockwise"),
}


@dataclass(frozen=True)
class Trio:
    """The models of a run, and what the student sampled."""

    name: str
    config: Config
    models: dict[Fp8Role, ModelConfig]
    noise: float  # noise of the student's weights, a share of each tensor's standard deviation


@dataclass(frozen=True)
class Scores:
    """The scores of N sampled tokens."""

    logprobs_NV: dict[Fp8Role, Tensor]
    targets_N: Tensor

    def of_target(self, role: Fp8Role) -> Tensor:
        return self.logprobs_NV[role].gather(1, self.targets_N[:, None])[:, 0]

    @property
    def advantage_N(self) -> Tensor:
        return self.of_target("teacher") - self.of_target("student")

    @property
    def kl_N(self) -> Tensor:
        student, reference = self.logprobs_NV["student"], self.logprobs_NV["reference"]
        return (student.exp() * (student - reference)).sum(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--demo", type=Path, help="directory of a seed's teacher and student")
    parser.add_argument("--smoke", action="store_true", help="one pair with one recipe, tiny")
    options = parser.parse_args()
    world = start_world(ParallelConfig(), seed=0)
    trios = [random_trio(family, PROMPTS) for family in FAMILIES]
    settings = SETTINGS
    if options.smoke:
        trios, settings = [random_trio("qwen2", prompts=4)], dict([*SETTINGS.items()][-1:])
    if options.demo:
        trios = [demo_trio(options.demo), *trios]
    print("| models | FP8 in | recipe | log p | advantage | signs | KL |")
    print("|---|---|---|--:|--:|--:|--:|")
    for trio in trios:
        for row in measure(trio, settings, world):
            print("| " + " | ".join(row) + " |", flush=True)
    stop_world()


def random_trio(family: str, prompts: int) -> Trio:
    """Random weights; the teacher is larger than the student."""
    config = config_of(
        student={"architecture": architecture(family, hidden=128, layers=4)},
        teacher={"architecture": architecture(family, hidden=192, layers=6)},
        rollout={"prompts_per_step": prompts, "samples_per_prompt": 1},
    )
    assert config.teacher is not None
    models: dict[Fp8Role, ModelConfig] = {
        "student": config.student,
        "teacher": config.teacher,
        "reference": config.student,
    }
    return Trio(f"{family}, random", config, models, NOISE)


def demo_trio(seed: Path) -> Trio:
    """The demo's teacher, its student before distillation, and after it where that run exists."""
    trained = seed / "collapse" / "stable_opd" / "model"
    before = ModelConfig(path=str(seed / "student" / "model"))
    after = ModelConfig(path=str(trained)) if trained.is_dir() else before
    teacher = {"path": str(seed / "teacher" / "model")}
    config = config_of(student={"path": before.path}, teacher=teacher)
    assert config.teacher is not None
    models: dict[Fp8Role, ModelConfig] = {
        "student": after,
        "teacher": config.teacher,
        "reference": before,
    }
    return Trio("demo, trained", config, models, 0.0 if trained.is_dir() else NOISE)


def architecture(family: str, hidden: int, layers: int) -> dict[str, Any]:
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "vocab_size": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,  # larger than usual, so that untrained models differ
        **(experts if family == "qwen3_moe" else {}),
    }


def config_of(**models: Any) -> Config:
    data = {"path": "synthetic:arithmetic", "options": {"rows": PROMPTS}}
    values = {
        "run": {"name": "fp8"},
        "tokenizer": {"path": "synthetic"},
        "data": {"train": data},
        "sampling": {"max_new_tokens": 96},
        "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": 1},
        "kl": {"beta": 1.0},
        **models,
    }
    return parse_config(values, origin="benchmarks/fp8.py")


def measure(trio: Trio, settings: dict[tuple[str, str], Setting], world: World) -> list[list[str]]:
    """The rows of a trio."""
    tokenizer = load_tokenizer(trio.config)
    plain: dict[Fp8Role, HiddenStatesGPTModel] = {
        role: load(trio, role, None, tokenizer.vocab_size, world) for role in trio.models
    }
    tokens_BT, sampled_BT = sample(trio, plain["student"], world)
    expected = score(plain, tokens_BT, sampled_BT)
    rows = []
    for (where, recipe), setting in settings.items():
        models = dict(plain)
        for role, chosen in setting.items():
            models[role] = load(trio, role, Fp8(role, chosen), tokenizer.vocab_size, world)
        found = score(models, tokens_BT, sampled_BT)
        rows.append([trio.name, where, recipe, *figures(found, expected, next(iter(setting)))])
    return rows


def load(
    trio: Trio, role: Fp8Role, fp8: Fp8 | None, vocab_size: int, world: World
) -> HiddenStatesGPTModel:
    """A model with the weights of this trio, the same with every recipe."""
    (chunk,) = load_model(
        trio.config, world, trio.models[role], vocab_size, fp8=fp8, trainable=role == "student"
    )
    if role == "student" and trio.noise:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in chunk.parameters():
                size = trio.noise * (weight.std() if weight.dim() > 1 else 0)
                weight.add_(size * torch.randn(weight.shape, generator=generator))
    return chunk


def sample(trio: Trio, student: HiddenStatesGPTModel, world: World) -> tuple[Tensor, Tensor]:
    """Prompts with responses, padded at the end [B, T], and which tokens were sampled."""
    tokenizer = load_tokenizer(trio.config)
    stops = teacher_stop_ids(trio.config, tokenizer)
    objective = build_source_objectives(trio.config, tokenizer.stop_token_ids, stops)
    architecture = configured_architecture(trio.config.student)
    prompts = load_prompts(trio.config, tokenizer, architecture, objective)
    prompts = prompts.select(range(trio.config.rollout.prompts_per_step))
    engine = EmbeddedEngine([student], world, tokenizer.decode, vocab_size=tokenizer.vocab_size)
    sampling = training_sampling(trio.config, tokenizer.stop_token_ids)
    rollouts = engine.generate(prompts, sampling, step=0)
    texts = [(list(r.prompt.token_ids), list(r.token_ids)) for r in rollouts]
    longest = max(len(prompt) + len(response) for prompt, response in texts)
    tokens_BT = torch.zeros(len(texts), longest, dtype=torch.int64)
    sampled_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
    for row, (prompt, response) in enumerate(texts):
        whole = len(prompt) + len(response)
        tokens_BT[row, :whole] = torch.tensor(prompt + response)
        sampled_BT[row, len(prompt) : whole] = True
    return tokens_BT, sampled_BT


def hidden_states(chunk: HiddenStatesGPTModel, tokens_BT: Tensor) -> Tensor:
    """[B, T, H]; the rows are packed sequences of one length."""
    num_rows, length = tokens_BT.shape
    positions_T = torch.arange(length).repeat(num_rows)
    ends = torch.arange(num_rows + 1, dtype=torch.int32) * length
    described = {"qkv_format": "thd", "max_seqlen_q": length, "max_seqlen_kv": length}
    described |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    packed = PackedSequences.of(ends, positions_T, chunk.pg_collection.cp, **described)
    tokens = tokens_BT.reshape(1, -1)
    return chunk(tokens, positions_T[None], None, packed_seq_params=packed).unflatten(
        0, (num_rows, length)
    )[:, :, 0]


@torch.no_grad()
def score(
    models: dict[Fp8Role, HiddenStatesGPTModel], tokens_BT: Tensor, sampled_BT: Tensor
) -> Scores:
    logprobs: dict[Fp8Role, Tensor] = {}
    for role, chunk in models.items():
        head = output_head([chunk])
        assert head is not None
        hidden_NH = hidden_states(chunk, tokens_BT)[:, :-1][sampled_BT[:, 1:]]
        logprobs[role] = (hidden_NH @ head.weight_VH.t()).double().log_softmax(dim=1)
    return Scores(logprobs, tokens_BT[:, 1:][sampled_BT[:, 1:]])


def figures(found: Scores, expected: Scores, role: Fp8Role) -> Sequence[str]:
    logprob = (found.of_target(role) - expected.of_target(role)).abs().mean()
    gap_N = (found.advantage_N - expected.advantage_N).abs()
    flips = (found.advantage_N.sign() != expected.advantage_N.sign()).double().mean()
    kl_gap = (found.kl_N - expected.kl_N).abs().mean()
    kl_bias = found.kl_N.mean() / expected.kl_N.mean() - 1
    return (
        f"{logprob:.4f}",
        f"{gap_N.mean():.4f} ({gap_N.mean() / expected.advantage_N.abs().mean():.1%})",
        f"{flips:.1%}",
        f"{kl_gap:.4f} ({kl_bias:+.1%})",
    )


if __name__ == "__main__":
    main()
