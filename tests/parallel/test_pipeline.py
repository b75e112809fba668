"""Every parallel layout gives the results of one rank: weights, outputs, losses, gradients, export.

One rank writes its results to a file; then four ranks run all layouts in one launch.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.files.huggingface import export_hf, load_hf
from stable_opd_mcore.models.files.safetensors_files import TensorFiles
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.models.weights import copy_weights
from stable_opd_mcore.parallel.pipeline import run_forward_backward
from stable_opd_mcore.parallel.world import (
    World,
    add_host_groups,
    broadcast_object,
    exchange_objects,
    gather_objects,
    object_group,
    start_world,
    stop_world,
)
from stable_opd_mcore.records import MicroBatch
from tests.models import tiny
from tests.parallel.launch import run_ranks

pytestmark = pytest.mark.slow

TIED, QWEN3, MOE, DELTA = "qwen2 tied", "qwen3_vl", "qwen3_moe", "qwen3_5"
SINKS, NEXT, DELTA_MOE = "gpt_oss", "qwen3_next", "qwen3_5_moe"
WINDOWS, GEMMA = "qwen3 window and biases", "gemma3"
FLASH, MOONLIGHT, AIR, V2_LITE = "glm4_moe_lite", "deepseek_v3", "glm4_moe", "deepseek_v2"
LAYOUTS = {  # settings, and the models that have something of their own there
    "TP2": ({"tensor": 2}, (QWEN3, DELTA, GEMMA)),
    "TP2xPP2+SP": (
        {"tensor": 2, "pipeline": 2, "sequence": True},
        (TIED, WINDOWS, MOE, DELTA, GEMMA),
    ),
    "PP2xVPP2": ({"pipeline": 2, "virtual_pipeline": 2}, (TIED, SINKS, AIR)),
    "DP4": ({}, (TIED,)),
    "EP2xPP2": ({"expert": 2, "pipeline": 2}, (MOE, SINKS, DELTA_MOE, MOONLIGHT, V2_LITE, AIR)),
    "EP4xTP2+SP": ({"expert": 4, "tensor": 2, "sequence": True}, (MOE, SINKS, NEXT, FLASH, AIR)),
}
MODELS = {
    TIED: tiny.architecture("qwen2", tie_word_embeddings=True),
    QWEN3: tiny.architecture("qwen3_vl"),
    MOE: tiny.architecture("qwen3_moe"),
    DELTA: tiny.architecture("qwen3_5"),
    SINKS: tiny.architecture("gpt_oss"),
    NEXT: tiny.architecture("qwen3_next"),
    DELTA_MOE: tiny.architecture("qwen3_5_moe"),
    FLASH: tiny.architecture("glm4_moe_lite"),
    MOONLIGHT: tiny.architecture("deepseek_v3"),
    AIR: tiny.architecture("glm4_moe"),
    V2_LITE: tiny.architecture("deepseek_v2"),
    GEMMA: tiny.architecture("gemma3"),
    WINDOWS: tiny.architecture("qwen3", attention_bias=True, **tiny.WINDOWS),
}
LENGTHS = [[5, 9, 2], [7, 1, 3, 3], [13, 5], [2, 7, 5]]  # one for each data-parallel rank at least


def test_every_layout_gives_the_results_of_one_rank(tmp_path: Path) -> None:
    """Same seed, same micro-batches: weights bit-equal, losses and gradients to rounding."""
    world = start_world(ParallelConfig(), seed=0)
    for name, architecture in MODELS.items():
        chunks = build_model(architecture, world, seed=3)
        directory = tmp_path / name
        export_hf(chunks, directory)
        losses, hidden, grads = _train_once(chunks, world)
        torch.save({"losses": losses, "hidden": hidden, "grads": grads}, directory / "one_rank.pt")
    stop_world()
    run_ranks(4, _check_layouts, tmp_path)


def _check_layouts(rank: int, world_size: int, path: Path) -> None:
    for layout, (sizes, models) in LAYOUTS.items():
        world = start_world(ParallelConfig(**sizes), seed=0)
        _check_collectives(world)
        for name in models:
            _check_model(f"{layout}, {name}", MODELS[name], world, path / name)
        if layout == "TP2":
            with pytest.raises(UserError, match=r"parallel.sequence=true"):
                build_model(MODELS[MOE], world)
            with pytest.raises(UserError, match=r"gone: neither .* restore the base model"):
                export_hf(build_model(MODELS[DELTA], world), path / "new", base=path / "gone")
        if layout == "TP2xPP2+SP":
            (chunk,) = build_model(MODELS[WINDOWS], world)
            with pytest.raises(ValueError, match=r"of 7 tokens cannot be cut over 2 .* of 2"):
                forward_hidden(chunk, tiny.microbatch([5, 2]))
        stop_world()
    with pytest.raises(ValueError, match=r"parallel.tensor=3.* 4 started ranks"):
        start_world(ParallelConfig(tensor=3), seed=0)
    with pytest.raises(UserError, match=r"parallel.expert=4 does not divide the 2 ranks"):
        start_world(ParallelConfig(pipeline=2, expert=4), seed=0)


def _check_model(label: str, architecture, world: World, path: Path) -> None:
    chunks = build_model(architecture, world, seed=3)
    expected = load_file(path / "model.safetensors")
    names = []
    for name, tensor in tiny.file_tensors(chunks):
        assert torch.equal(tensor, expected[name]), f"{label}: {name} depends on the layout"
        names.append(name)
    assert sorted(names) == sorted(expected), label

    # In one layout activations are kept.
    recompute = "none" if world.tensor_size * world.pipeline_size == 4 else "full"
    loaded = build_model(architecture, world, seed=None, recompute=recompute)
    with pytest.MonkeyPatch.context() as patch:
        num_read = _count_elements_read(patch)
        load_hf(loaded, path)
    own = [weight for chunk in loaded for weight in chunk.parameters()]
    padding = -architecture.vocab_size % world.tensor_size * architecture.hidden_size
    num_own = sum(weight.numel() for weight in own)
    assert num_own - 2 * padding <= num_read() <= num_own, f"{label}: reads other ranks' parts"
    exported = path.parent / f"export of {label}"
    export_hf(loaded, exported, max_file_bytes=20_000)
    files = sorted(exported.glob("*.safetensors"))
    assert len(files) > 1
    merged = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged), label

    one_rank = torch.load(path / "one_rank.pt")
    tolerance = tiny.tolerance(architecture)
    losses, hidden, grads = _train_once(loaded, world)
    if world.is_last_stage:
        assert losses == pytest.approx(one_rank["losses"], rel=tolerance), label
        for found, wanted in zip(hidden, one_rank["hidden"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    for name, wanted in one_rank["grads"].items():
        error, size = (grads[name] - wanted).abs().max(), wanted.abs().max()  # 0: an unused expert
        assert error <= tolerance * size, f"{label}: {name} gradient {error:.1e} of {size:.1e}"


def _count_elements_read(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the elements that are read from safetensors from now on."""
    read, sizes = TensorFiles.read, []

    def counting(self, name: str, part: tuple[slice, ...]) -> Tensor:
        tensor = read(self, name, part)
        sizes.append(tensor.numel())
        return tensor

    patch.setattr(TensorFiles, "read", counting)
    return lambda: sum(sizes)


def _train_once(chunks, world: World) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
    """Losses and forward-only hidden states of all micro-batches, and the step's gradients by HF
    name."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    own_batches = range(world.data_rank, len(LENGTHS), world.data_size)
    microbatches = [tiny.microbatch(LENGTHS[i], seed=i) for i in own_batches]
    frozen = build_model(chunks[0].architecture, world, trainable=False, seed=9)
    copy_weights(chunks, frozen)
    hidden = run_forward_backward(
        frozen, microbatches, _hidden_only, world=world, forward_only=True
    )
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [
        DistributedDataParallel(c.config, options, c, pg_collection=world.groups) for c in chunks
    ]
    head = output_head(chunks)
    losses = run_forward_backward(
        wrapped,
        microbatches,
        lambda chunk, batch: _with_loss(chunk, batch, head, world),
        world=world,
    )
    finalize_model_grads(wrapped, None, pg_collection=world.groups)
    with torch.no_grad():
        for chunk in chunks:
            for weight in chunk.parameters():
                if weight.requires_grad:
                    weight.copy_(weight.main_grad)
    grads = {name: tensor.clone() for name, tensor in tiny.file_tensors(chunks)}
    return _in_global_order(losses, world), _in_global_order(hidden, world), grads


def _in_global_order(results: list, world: World) -> list:
    parts = gather_objects(results, world.data_group)
    if not parts[0]:
        return []
    return [parts[i % world.data_size][i // world.data_size] for i in range(len(LENGTHS))]


def _hidden_only(chunk, batch: MicroBatch):
    return forward_hidden(chunk, batch), lambda hidden_TH: hidden_TH.clone()


def _with_loss(chunk, batch: MicroBatch, head, world: World):
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        vocab_parallel_cross_entropy,
    )

    def loss_of(hidden_TH: Tensor) -> tuple[Tensor, float]:
        hidden_NH = copy_to_tensor_model_parallel_region(hidden_TH.index_select(0, batch.rows_N))
        logits_NV = hidden_NH @ head.weight_VH.T
        real = head.vocab_size - head.vocab_start
        logits_NV = logits_NV + torch.zeros_like(logits_NV).index_fill(
            1, torch.arange(min(real, logits_NV.shape[1]), logits_NV.shape[1]), -1e9
        )
        losses_N = vocab_parallel_cross_entropy(logits_NV[None], batch.targets_N[None])[0]
        loss = (losses_N * batch.sft_weight_N).sum()
        return loss, loss.item()

    return forward_hidden(chunk, batch), loss_of


def _check_collectives(world: World) -> None:
    assert gather_objects(world.data_rank, world.data_group) == list(range(world.data_size))
    assert world.tensor_size * world.pipeline_size == world.model_group.size()
    assert world.model_group.size() * world.data_group.size() == dist.get_world_size()
    if world.pipeline_size == 1 or world.virtual_pipeline:
        return
    groups = (dist.group.WORLD, world.model_group, world.data_group)
    expected = [gather_objects(world.rank, group) for group in groups]
    add_host_groups(groups)  # a GPU needs them: objects travel in groups of their own
    assert [gather_objects(world.rank, group) for group in groups] == expected
    assert [broadcast_object(world.rank, group) for group in groups] == [e[0] for e in expected]
    for group, ranks in zip(groups, expected, strict=True):
        sent = [(world.rank, to, "x" * 1000 * to) for to in ranks]
        assert exchange_objects(sent, group) == [
            (of, world.rank, "x" * 1000 * world.rank) for of in ranks
        ]
    for group, ranks in zip(groups, expected, strict=True):
        assert len(ranks) == 1 or object_group(group) is not group
