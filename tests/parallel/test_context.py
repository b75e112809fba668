"""Context-parallel slices: Megatron's token order, and the losses, values of every token and
gradients of whole sequences."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stable_opd_mcore.config.schema import OptimizerConfig, ParallelConfig
from stable_opd_mcore.losses.objectives import build_objective
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.models.weights import iter_hf_tensors
from stable_opd_mcore.parallel.context import slice_microbatch, token_indices
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import LossOutput, MicroBatch, Sample, SequenceScores
from stable_opd_mcore.sample_facts import SampleWeights
from stable_opd_mcore.scoring.megatron import MegatronScorer
from stable_opd_mcore.scoring.scorer import with_scores
from stable_opd_mcore.scoring.served import ServedScorer
from stable_opd_mcore.train.student import Student
from tests.models import tiny
from tests.parallel.launch import run_ranks
from tests.shares import pack_share, sample_of, weights_of, with_gaps
from tests.train.runs import ALONE, tiny_architecture, tiny_config

pytestmark = pytest.mark.slow

VOCAB = 27
Given = tuple[list[Sample], SampleWeights]
# (prompt, response) tokens: one, fewer than 2 * context, primes, multiples of it, a long response.
SIZES = [(1, 0), (1, 1), (2, 1), (1, 6), (5, 8), (7, 10), (8, 8), (3, 28), (2, 45), (4, 0)]
LAYOUTS = {  # settings, and the objectives that are compared there
    "CP4": ({"context": 4}, ("opd, discounted", "gkd")),
    "CP2xDP2": ({"context": 2}, ("opd, discounted", "lsm, served, windows")),
    "TP2xCP2+SP": (
        {"tensor": 2, "context": 2, "sequence": True},
        ("opd, discounted", "gkd", "own"),
    ),
    "PP2xCP2": ({"pipeline": 2, "context": 2}, ("opd, discounted", "lsm, served, windows")),
}
MARGIN = Path(__file__).parents[2] / "docs/examples/pairwise_margin.py"
OBJECTIVES = {
    "opd, discounted": {"name": "opd", "discount": 0.9},
    "gkd": {"name": "gkd", "divergence": "jsd"},
    "own": {"name": f"{MARGIN}:pairwise_margin", "top_k": 6},
    "lsm, served, windows": {"name": "lsm", "top_k": 6},  # a student with sliding windows
}
WINDOWS = tiny.architecture(
    "gemma3",
    vocab_size=VOCAB,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
)
# Compared on one rank only.
OF_TRANSCRIPTS = {
    "opd": {"name": "opd"},
    "own": OBJECTIVES["own"],
    "gkd": OBJECTIVES["gkd"],
    "lsm": {"name": "lsm", "top_k": 6},
    "grpo": {"name": "grpo"},
}


def make_samples() -> Given:
    rng = random.Random(0)
    samples = []
    for index, (prompt, response) in enumerate(SIZES):
        tokens = tuple(rng.randrange(VOCAB) for _ in range(prompt + response))
        sample = sample_of(
            kind="golden" if index in (4, 8) else "rollout",
            prompt_id=f"p:{index}",
            prompt_token_ids=tokens[:prompt],
            response_token_ids=tokens[prompt:],
            teacher_scores=served_scores(index, tokens[prompt:]),
        )
        samples.append(with_gaps(sample) if response > 8 else sample)
    values = ([rng.random() for _ in samples] for _ in range(3))
    return samples, weights_of(samples, *values)


def served_scores(index: int, response: Sequence[int]) -> SequenceScores:
    """As a server would score the response, from random distributions."""
    rng = torch.Generator().manual_seed(index)
    log_p_LV = torch.randn(len(response), VOCAB, generator=rng).log_softmax(1)
    top = log_p_LV.topk(6, dim=1)
    own = log_p_LV[torch.arange(len(response)), torch.tensor(response, dtype=torch.int64)]
    extra = log_p_LV[:, [1]]
    return SequenceScores(own.numpy(), top.indices.numpy(), top.values.numpy(), extra.numpy())


def packed(world: World, given: Given, max_tokens: int) -> list[MicroBatch]:
    """This rank's slices of the micro-batches of all samples."""
    samples, weights = given
    batches = pack_share(
        samples,
        weights,
        world.batch_rank,
        world.batch_size,
        max_tokens=max_tokens,
        pad_to_multiple=world.token_multiple,
        sequence_multiple=world.sequence_multiple,
    )
    return [slice_microbatch(batch, world.context_rank, world.context_size) for batch in batches]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_have_the_order_of_megatrons_rotary_embedding(size: int) -> None:
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    lengths = [2 * size * length for length in (1, 5, 0, 3)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = torch.arange(sum(lengths))
    for rank in range(size):
        expected = [
            _get_thd_freqs_on_this_cp_rank(rank, size, sequence[: len(sequence) // size], sequence)
            for sequence in tokens.split(lengths)
        ]
        assert torch.equal(token_indices(cu_seqlens, rank, size), torch.cat(expected))


def test_slices_give_the_losses_and_gradients_of_whole_sequences(tmp_path: Path) -> None:
    """Losses, scores, returns and every gradient."""
    world = start_world(ParallelConfig(), seed=0)
    one_rank = {name: train_once(world, name, tmp_path, make_samples()) for name in OBJECTIVES}
    torch.save(one_rank, tmp_path / "one_rank.pt")
    stop_world()
    run_ranks(4, check_layouts, tmp_path)


@pytest.mark.parametrize("name", OF_TRANSCRIPTS)
def test_a_transcript_has_the_gradient_of_its_turns_after_the_text_before(tmp_path, name) -> None:
    """Three sampled pieces between observed ones, each as the response to all that precedes it."""
    ids = random.Random(1).choices(range(VOCAB), k=40)
    turns = [range(6, 11), range(15, 16), range(27, 40)]
    places = [place for turn in turns for place in turn]
    transcript = Sample("rollout", "p:0", ids, places, 6, (True,) * len(places))
    parts = [sample_of("rollout", "p:0", ids[: t[0]], ids[t[0] : t.stop]) for t in turns]
    world, advantage = start_world(ParallelConfig(), seed=0), 0.7 if name == "grpo" else None
    found, expected = (
        train_once(world, name, tmp_path, (samples, weights_of(samples, 0.3, 0.2, 0, advantage)))
        for samples in ([transcript], parts)
    )
    stop_world()
    for key, value in expected.items():
        mine = found[key]
        if key.endswith("_N"):  # by sample and token
            mine = mine[0, : len(places)]
            value = torch.cat([value[number, : len(turn)] for number, turn in enumerate(turns)])
        error = (mine - value).abs().max()
        assert error <= 1e-5 * value.abs().max(), f"{key}: {error:.1e} of {value.abs().max():.1e}"


def test_an_observed_token_changes_the_values_of_later_tokens_only(tmp_path) -> None:
    """No loss reads it as a target: after the last turn it changes nothing at all."""
    world = start_world(ParallelConfig(), seed=0)
    ids, places = random.Random(1).choices(range(VOCAB), k=24), [*range(6, 11), *range(15, 20)]
    found = []
    for changed in (range(0), range(20, 24), range(11, 15)):
        tokens = [(one + 1) % VOCAB if place in changed else one for place, one in enumerate(ids)]
        samples = [Sample("rollout", "p:0", tokens, places, 6, (True,) * len(places))]
        found.append(train_once(world, "opd", tmp_path, (samples, weights_of(samples, 0.3, 0.2))))
    stop_world()
    expected, after_the_last_turn, between_turns = found
    for key, value in expected.items():
        assert torch.equal(after_the_last_turn[key], value), key
        if key.endswith("_N"):
            changes = (between_turns[key] != value)[0, : len(places)]
            assert changes.tolist() == [False] * 5 + [True] * 5, key


def check_layouts(rank: int, world_size: int, path: Path) -> None:
    one_rank = torch.load(path / "one_rank.pt")
    for layout, (sizes, objectives) in LAYOUTS.items():
        world = start_world(ParallelConfig(**sizes), seed=0)
        for name in objectives:
            for key, found in train_once(world, name, path, make_samples()).items():
                expected = one_rank[name][key]
                error, size = (found - expected).abs().max(), expected.abs().max()
                assert error <= 1e-5 * size, f"{layout}, {name}: {key} {error:.1e} of {size:.1e}"
        stop_world()


def train_once(world: World, name: str, path: Path, given: Given) -> dict[str, Tensor]:
    """One forward and backward over all samples: sums of losses, values per token, gradients."""
    alone = ALONE if name == "grpo" else {}
    config = tiny_config(path, "context", objective=(OBJECTIVES | OF_TRANSCRIPTS)[name], **alone)
    objective = build_objective(config, [1], [1])
    architecture = WINDOWS if "windows" in name else read_architecture(tiny_architecture(32, 2))
    student = Student(
        build_model(architecture, world, recompute="selective", seed=1),
        OptimizerConfig(),
        "fp32",
    )
    teacher, reference = (
        MegatronScorer(
            build_model(read_architecture(tiny_architecture(hidden, 2)), world, trainable=False),
            world,
            vocab_size=VOCAB,
            top_k=objective.top_k if needs == "topk" else None,
            hidden_only=needs == "hidden",
        )
        for hidden, needs in ((48, objective.teacher_needs), (32, objective.reference_needs))
    )
    if "served" in name:
        teacher = ServedScorer(world.is_last_stage, vocab_size=VOCAB, stop_ids=(1,), top_k=6)
    batches = with_scores(packed(world, given, max_tokens=64), teacher=teacher, reference=reference)

    def forward_step(chunk, batch: MicroBatch):
        return forward_hidden(chunk, batch), lambda hidden_TH: loss_of(batch, hidden_TH)

    def loss_of(batch: MicroBatch, hidden_TH: Tensor) -> tuple[Tensor, LossOutput]:
        output = objective(
            hidden_TH.index_select(0, batch.rows_N),
            output_head(student.chunks, VOCAB),
            batch,
            teacher_head=teacher.head,
            reference_head=reference.head,
            context_group=world.context_group,
        )
        return output.loss, output

    student.zero_grad()
    outputs = run_forward_backward(student.model, batches, forward_step, world=world)
    grad_norm = student.finish_grads()
    gather_gradients(student, world)
    with torch.no_grad():
        for chunk in student.chunks:
            for weight in chunk.parameters():
                weight.copy_(weight.main_grad)
    gradients = {key: tensor.clone() for key, tensor in iter_hf_tensors(student.chunks)}
    return {
        **gradients,
        **summed(world, outputs, batches),
        "grad_norm": torch.tensor(grad_norm),
    }


def gather_gradients(student: Student, world: World) -> None:
    """Gather the gradient sums of all optimizer shards; each rank has those of its own."""
    group = world.groups.dp_cp
    for model in student.model:
        for bucket in (bucket for each in model.bucket_groups for bucket in each.buckets):
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def summed(world: World, outputs: list[LossOutput], batches: list[MicroBatch]) -> dict[str, Tensor]:
    """Sums over all ranks: the parts of the loss [], and its values per sample and token [S, T]."""
    longest = max(response for _, response in SIZES)
    found = {key: torch.zeros(()) for key in ("pg", "kl", "sft")}
    keys = ("student_logprob_N", "advantage_N", "entropy_N", "kl_reference_N", "kl_teacher_N")
    for key in keys:
        found[key] = torch.zeros(len(SIZES), longest)
    if outputs and world.tensor_rank == 0:
        for output, batch in zip(outputs, batches, strict=True):
            for key, total in found.items():
                value = getattr(output, key)
                if value is None:  # gkd has no advantage
                    continue
                if total.ndim:
                    total[batch.sample_index_N, batch.token_index_N] += value
                else:
                    total += value.detach()
    for total in found.values():
        dist.all_reduce(total)
    return found
