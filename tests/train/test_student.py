"""The student's gradients and optimizer: the head's part of Megatron's gradient buffer, and the
memory of an update.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stable_opd_mcore.config.schema import OptimizerConfig, ParallelConfig
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.losses.fused import fused_loss
from stable_opd_mcore.losses.token_losses import Terms
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import MicroBatch
from stable_opd_mcore.train.student import Student
from tests.parallel.launch import run_ranks
from tests.shares import sample_of, weights_of
from tests.train.runs import tiny_architecture


def resident_mib(field: str) -> float:
    """This process's VmRSS (now) or VmHWM (maximum since the last write to clear_refs)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def update(student: Student) -> None:
    student.zero_grad()
    student.finish_grads()
    student.update(1e-3)


def test_the_optimizer_on_one_rank_makes_no_copies():
    """The one rank owns every shard, so an update copies neither gradients nor weights."""
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(read_architecture(tiny_architecture(1024, 2)), world)
    student = Student(chunks, OptimizerConfig(), "fp32")
    weights_mib = sum(p.nbytes for chunk in chunks for p in chunk.parameters()) / 2**20
    update(student)  # allocates Adam's moments
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mib("VmRSS:")
    update(student)
    assert resident_mib("VmHWM:") - before < 0.3 * weights_mib
    stop_world()


def golden_microbatches() -> list[MicroBatch]:
    samples = [
        sample_of("golden", str(i), (1, 2, 3), tuple(range(i, i + 9)), (True,) * 9)
        for i in range(3)
    ]
    return pack(samples, weights_of(samples, sft=0.1), max_tokens=24)


def run_golden(model: Sequence, chunks: Sequence, world: World) -> None:
    """Forward and backward of two micro-batches; the loss is the golden tokens' likelihood."""
    head = output_head(chunks)
    assert head is not None

    def forward_step(chunk, batch):
        def loss_of(hidden_TH):
            rows = hidden_TH.index_select(0, batch.rows_N)
            out = fused_loss(rows, head, batch, Terms(), block_rows=5)
            return out.loss, out

        return forward_hidden(chunk, batch), loss_of

    results = run_forward_backward(model, golden_microbatches(), forward_step, world=world)
    assert len(results) == 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_heads_gradient_is_summed_in_megatrons_buffer(tied, precision):
    """Tied, the parameter is the embedding, too: its buffer holds the sum of both gradients."""
    world = start_world(ParallelConfig(), seed=0)
    architecture = read_architecture(tiny_architecture(32, 2, tie_word_embeddings=tied))
    chunks = build_model(architecture, world, precision=precision)
    run_golden(chunks, chunks, world)
    expected = {name: p.grad for name, p in chunks[0].named_parameters()}
    for parameter in chunks[0].parameters():
        parameter.grad = None
    student = Student(chunks, OptimizerConfig(), precision)
    for _ in range(2):  # the buffer is emptied between steps
        student.zero_grad()
        run_golden(student.model, chunks, world)
        for name, parameter in chunks[0].named_parameters():
            assert parameter.grad is None
            assert parameter.main_grad.dtype == torch.float32
            torch.testing.assert_close(
                parameter.main_grad,
                expected[name].float(),
                rtol=2e-5 if precision == "fp32" else 2e-2,
                atol=1e-6 if precision == "fp32" else 2e-2 * float(expected[name].abs().max()),
            )
    stop_world()


def test_a_loss_in_megatrons_buffer_is_differentiated_as_it_is():
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(read_architecture(tiny_architecture(32, 2)), world)
    Student(chunks, OptimizerConfig(), "fp32")
    batch, head = golden_microbatches()[0], output_head(chunks)
    hidden = forward_hidden(chunks[0], batch).index_select(0, batch.rows_N)
    loss = fused_loss(hidden, head, batch, Terms()).loss
    with pytest.raises(RuntimeError, match="must be differentiated as it is"):
        (2 * loss).backward()
    stop_world()


def test_replicas_sum_gradients_inside_the_last_backward_pass():
    """From the second step on: in the first Megatron counts the gradients of each bucket."""
    run_ranks(2, check_overlapped_sum)


def check_overlapped_sum(rank: int, world_size: int) -> None:
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(read_architecture(tiny_architecture(32, 2)), world)
    student = Student(chunks, OptimizerConfig(), "fp32")
    sums = student.model[0].bucket_groups
    for step in range(3):
        student.zero_grad()
        run_golden(student.model, chunks, world)
        assert all((group.grad_reduce_handle is not None) == (step > 0) for group in sums)
        norm = student.finish_grads()
    alone = sum(float(p.grad.double().square().sum()) for p in plain_parameters(world))
    assert norm == pytest.approx(2 * alone**0.5, rel=1e-5)
    stop_world()


def plain_parameters(world: World) -> list[torch.nn.Parameter]:
    """The same model's, without Megatron's buffers, with the gradients of one replica."""
    chunks = build_model(read_architecture(tiny_architecture(32, 2)), world)
    run_golden(chunks, chunks, world)
    return list(chunks[0].parameters())


def test_layers_that_can_are_told_to_add_to_megatrons_buffer():
    """As Transformer Engine's linear layers do; it is not installed here."""
    world = start_world(ParallelConfig(), seed=0)
    chunks = build_model(read_architecture(tiny_architecture(32, 2)), world)
    layer = chunks[0].decoder.layers[1].mlp.linear_fc1
    layer.fuse_wgrad_accumulation = False
    Student(chunks, OptimizerConfig(), "fp32")
    assert layer.fuse_wgrad_accumulation
    assert not hasattr(chunks[0].decoder.layers[0].mlp.linear_fc1, "fuse_wgrad_accumulation")
    stop_world()
