"""Rollouts from the student's own Megatron model chunks.

Each distinct prompt of a batch is run once; its keys and values are then repeated for its samples,
and all rows are decoded one token a step. Finished rows leave the batch. A token's noise depends
only on seed, step, prompt, sample and position (noise.py), so batch size, other rows and the
parallel layout do not change what is drawn.

Megatron runs the chunks in its static inference mode, with three replacements. Attention keeps keys
and values in KVCache: Megatron's own static cache rotates every cached key again at each step (2.4
times the whole step's cost at 4 layers of 256), has no mask for padding after the prompt, and
cannot drop rows. Linear layers skip their autograd wrappers, a fifth of a small model's step.
Transformer layers skip dropout and checks that matter in training only, a twentieth.

On a GPU there is no second copy of the weights. On a CPU there is one while `generate` runs, in
oneDNN's layout, with which the products of a few rows take about half the time: 4 bytes a weight in
fp32, given back before scores and gradients need memory.

Replicas that share out experts run every forward pass together: one that has no row left runs a
token of padding until all have finished.

Ordering: the trained weights themselves are read, so `publish` only stores the version. Not here:
servers, weight transfer. Letters: P prompts, R rollouts of one batch, B rows still running, T
prompt slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.utils import unwrap_model
from numpy.typing import NDArray
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.families import rotary_frequencies
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, output_head
from stable_opd_mcore.models.linear import linear, packed
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import FinishReason, Prompt, Rollout
from stable_opd_mcore.rollout.engine import NothingInFlight, Sampling, check_prompts
from stable_opd_mcore.rollout.kv_cache import KVCache
from stable_opd_mcore.rollout.noise import row_key, sample_tokens, uniforms

# Finished rows are dropped when at most this share of the batch is still running. Between 0.75 and
# 0.9 the time is the same; never dropping takes three times as long on a long-tailed batch.
_COMPACT_BELOW = 0.85


class EmbeddedEngine(NothingInFlight):
    """A `RolloutEngine` over the model chunks that are being trained.

    Args:
        chunks: this rank's model chunks, with or without gradient wrapper.
        decode: token ids (no stop token) to text.
        vocab_size: of the tokenizer of student and teacher; larger ids are never drawn.
        max_rows: responses decoded at once; more are drawn in several batches.
        progress: called after each decoded token of the batch.

    Raises:
        UserError: the model has fewer vocabulary entries than `vocab_size`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        world: World,
        decode: Callable[[Sequence[int]], str],
        *,
        vocab_size: int,
        max_rows: int = 256,
        progress: Callable[[], None] = lambda: None,
    ):
        self.weight_version = 0
        self._chunks: list[HiddenStatesGPTModel] = unwrap_model(list(chunks))
        self._head = output_head(self._chunks)
        self._world = world
        self._decode = decode
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self._progress = progress
        architecture = self._chunks[0].architecture
        if architecture.vocab_size < vocab_size:
            raise UserError(
                f"the student has {architecture.vocab_size} vocabulary entries, fewer than the "
                f"{vocab_size} of its tokenizer: it belongs to another tokenizer"
            )
        self._window = architecture.max_positions
        self._attentions = [
            module
            for chunk in self._chunks
            for module in chunk.modules()
            if isinstance(module, SelfAttention)
        ]
        # Switches Megatron's model to inference; KVCache holds the keys and values. Its length
        # sizes an unused rotary table, and must be even under context parallelism.
        self._context = StaticInferenceContext(max_rows, max_sequence_length=2)

    def publish(self, weight_version: int) -> None:
        """Store the version of the following rollouts."""
        self.weight_version = weight_version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`. All ranks of the replica call it together."""
        check_prompts(prompts, sampling, vocab_size=self._vocab_size, window=self._window)
        rows = [(prompt, sample) for prompt in prompts for sample in range(sampling.num_samples)]
        rollouts: list[Rollout] = []
        with _inference_mode(self._chunks), self._packed_head():
            for start in range(0, len(rows), self._max_rows):
                rollouts += self._draw(rows[start : start + self._max_rows], sampling, step)
            while self._some_replica_runs(False):
                padding_BT = torch.zeros(1, 1, dtype=torch.int64, device=self._world.device)
                self._run(padding_BT, self._new_cache([1], 1))
        return rollouts

    def _draw(
        self, rows: Sequence[tuple[Prompt, int]], sampling: Sampling, step: int
    ) -> list[Rollout]:
        """Decode `rows` (prompt, sample index) together."""
        device = self._world.device
        prompts: list[Prompt] = []
        prompt_of_row: list[int] = []
        for prompt, _ in rows:  # samples of one prompt are adjacent
            if not prompts or prompts[-1] is not prompt:
                prompts.append(prompt)
            prompt_of_row.append(len(prompts) - 1)
        keys = [row_key(sampling.seed, step, prompt.prompt_id, sample) for prompt, sample in rows]
        tokens_RL, logprobs_RL = self._decode_rows(
            prompts,
            torch.tensor(prompt_of_row, device=device),
            torch.tensor(keys, dtype=torch.int64, device=device),
            sampling,
        )
        lengths = _lengths(tokens_RL, sampling.stop_token_ids)
        return [
            self._rollout(prompt, sample, tokens, logprobs, length, stopped)
            for (prompt, sample), tokens, logprobs, (length, stopped) in zip(
                rows, tokens_RL.cpu().numpy(), logprobs_RL.cpu().numpy(), lengths, strict=True
            )
        ]

    def _rollout(
        self,
        prompt: Prompt,
        sample: int,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        length: int,
        stopped: bool,
    ) -> Rollout:
        reason: FinishReason = "stop" if stopped else "length"
        return Rollout(
            prompt=prompt,
            sample_index=sample,
            token_ids=tokens[:length].astype(np.int32),
            rollout_logprobs=logprobs[:length].copy(),
            finish_reason=reason,
            weight_version=self.weight_version,
            text=self._decode(tokens[: length - stopped].tolist()),
        )

    def _decode_rows(
        self, prompts: Sequence[Prompt], prompt_of_row_R: Tensor, keys_R: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        """The decode loop: tokens and log-probabilities [R, L], undefined after a stop token."""
        num_rows, device = len(keys_R), self._world.device
        tokens_RL = torch.zeros(num_rows, sampling.max_new_tokens, dtype=torch.int64, device=device)
        logprobs_RL = torch.zeros(num_rows, sampling.max_new_tokens, device=device)
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)

        lengths = [len(prompt.token_ids) for prompt in prompts]
        cache = self._new_cache(lengths, sampling.max_new_tokens)
        hidden_BH = self._forward(_left_padded(prompts, device), cache)
        if len(prompts) < num_rows:
            cache.select(prompt_of_row_R)
            hidden_BH = None if hidden_BH is None else hidden_BH[prompt_of_row_R]

        running_B, keys_B = torch.arange(num_rows, device=device), keys_R
        done_B = torch.zeros(num_rows, dtype=torch.bool, device=device)
        for position in range(sampling.max_new_tokens):
            tokens_B, logprobs_B = self._sample(hidden_BH, keys_B, position, sampling)
            self._progress()
            tokens_RL[running_B, position] = tokens_B
            logprobs_RL[running_B, position] = logprobs_B
            done_B = done_B | (tokens_B[:, None] == stop_ids).any(dim=1)
            if position + 1 == sampling.max_new_tokens:
                break
            num_running = len(done_B) - int(done_B.sum())
            if num_running == 0:
                break
            if num_running <= _COMPACT_BELOW * len(done_B):
                alive = (~done_B).nonzero()[:, 0]
                cache.select(alive)
                running_B, keys_B, tokens_B, done_B = (
                    x[alive] for x in (running_B, keys_B, tokens_B, done_B)
                )
            hidden_BH = self._forward(tokens_B[:, None], cache)
        return tokens_RL, logprobs_RL

    def _new_cache(self, lengths: list[int], max_new_tokens: int) -> KVCache:
        """An empty cache for prompts of these lengths, which every attention layer uses from now
        on."""
        chunk = self._chunks[0]
        positions_P = torch.arange(max(lengths) + max_new_tokens, dtype=torch.float32)
        angles_PD = torch.outer(positions_P, rotary_frequencies(chunk.architecture))
        cache = KVCache(lengths, angles_PD.to(self._world.device), chunk.config.params_dtype)
        for attention in self._attentions:
            vars(attention)["forward"] = partial(_attention_forward, attention, cache)
        return cache

    def _some_replica_runs(self, this_one: bool) -> bool:
        """Whether this replica or one that shares its experts runs a forward pass now. Collective
        over them."""
        if self._world.coupled_replicas == 1:
            return this_one
        running = torch.tensor(int(this_one), device=self._world.device)
        dist.all_reduce(running, op=dist.ReduceOp.MAX, group=self._world.groups.ep)
        return bool(running)

    def _forward(self, tokens_BT: Tensor, cache: KVCache) -> Tensor | None:
        """As `_run`, when the other replicas are ready for it, too."""
        self._some_replica_runs(True)
        return self._run(tokens_BT, cache)

    def _run(self, tokens_BT: Tensor, cache: KVCache) -> Tensor | None:
        """Run new tokens through all stages: last hidden states [B, H] on the last, else None."""
        batch, num_tokens = tokens_BT.shape
        config = self._chunks[0].config
        hidden_TBH = torch.empty(
            (num_tokens, batch, config.hidden_size),
            dtype=config.params_dtype,
            device=tokens_BT.device,
        )
        positions_BT = cache.begin(num_tokens)
        for chunk in self._chunks:
            if not chunk.pre_process:
                _receive(hidden_TBH, self._world)
                chunk.set_input_tensor(hidden_TBH)
            hidden_TBH = chunk(tokens_BT, positions_BT, None, inference_context=self._context)
            if not chunk.post_process:
                _send(hidden_TBH, self._world)
        cache.end()
        return hidden_TBH[-1] if self._world.is_last_stage else None

    def _sample(
        self, hidden_BH: Tensor | None, keys_B: Tensor, position: int, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        """Draw on the last stage and broadcast to the replica: tokens_B, logprobs_B."""
        drawn_2B = torch.empty(2, len(keys_B), dtype=torch.float64, device=keys_B.device)
        if hidden_BH is not None:
            tokens_B, logprobs_B = sample_tokens(
                self._logits(hidden_BH),
                sampling.temperature,
                sampling.top_p,
                uniforms(keys_B, position),
            )
            if self._world.model_group.size() == 1:
                return tokens_B, logprobs_B
            drawn_2B = torch.stack((tokens_B.double(), logprobs_B.double()))
        # Draw on one rank and broadcast, because other ranks may round differently.
        source = (self._world.pipeline_size - 1) * self._world.tensor_size
        dist.broadcast(drawn_2B, group=self._world.model_group, group_src=source)
        return drawn_2B[0].long(), drawn_2B[1].float()

    @contextmanager
    def _packed_head(self) -> Iterator[None]:
        """Hold the head's weight as `linear` takes it."""
        self._head_weight_VH = None if self._head is None else packed(self._head.weight_VH)
        try:
            yield
        finally:
            self._head_weight_VH = None

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        """fp32 logits of the common vocabulary [B, V], gathered over the head's shards."""
        head = self._head
        assert head is not None and self._head_weight_VH is not None
        logits_BV = linear(hidden_BH, self._head_weight_VH)
        if head.group is not None and head.group.size() > 1:
            shards = [torch.empty_like(logits_BV) for _ in range(head.group.size())]
            dist.all_gather(shards, logits_BV.contiguous(), group=head.group)
            logits_BV = torch.cat(shards, dim=1)
        return logits_BV[:, : self._vocab_size].float()


def _left_padded(prompts: Sequence[Prompt], device: torch.device) -> Tensor:
    """Prompt ids [P, T], int64, each prompt's last token in the last column."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    rows = [(0,) * (longest - len(prompt.token_ids)) + prompt.token_ids for prompt in prompts]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _lengths(tokens_RL: Tensor, stop_ids: Sequence[int]) -> list[tuple[int, bool]]:
    """Per row: response length including a stop token, and whether there is one."""
    is_stop_RL = torch.isin(
        tokens_RL, torch.tensor(stop_ids, dtype=torch.int64, device=tokens_RL.device)
    )
    first_R = is_stop_RL.int().argmax(dim=1)
    return [
        (first + 1, True) if stopped else (tokens_RL.shape[1], False)
        for first, stopped in zip(first_R.tolist(), is_stop_RL.any(dim=1).tolist(), strict=True)
    ]


def _layer_forward(layer: Any, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Megatron's transformer layer without dropout and without biases after attention and MLP,
    which no family has: the output, and no context.
    """
    mixed, _ = layer.self_attention(layer.input_layernorm(hidden_states))
    hidden_states = hidden_states + mixed
    output, _ = layer.mlp(layer.pre_mlp_layernorm(hidden_states))
    return hidden_states + output, None


def _attention_forward(
    attention: SelfAttention, cache: KVCache, hidden_TBH: Tensor, **_: Any
) -> tuple[Tensor, Any]:
    """Megatron's attention while decoding, with `cache`: the output and its bias."""
    heads: Any = attention.get_query_key_value_tensors(hidden_TBH)
    q_TBQD, k_TBGD, v_TBGD = heads
    mixed_TBE = cache.attend(
        attention.layer_number, q_TBQD, k_TBGD, v_TBGD, attention.config.softmax_scale
    )
    return attention.linear_proj(mixed_TBE)


def _linear_forward(layer: Any, weight: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Megatron's parallel linear without autograd functions: output, and the bias if skipped.

    `weight` is the layer's, packed.
    """
    bias = layer.bias
    output = linear(hidden, weight, None if layer.skip_bias_add else bias)
    group = layer.tp_group
    if isinstance(layer, RowParallelLinear) and group.size() > 1:
        dist.all_reduce(output, group=group)
    return output, bias if layer.skip_bias_add else None


@contextmanager
def _inference_mode(chunks: Sequence[HiddenStatesGPTModel]) -> Iterator[None]:
    """Evaluation mode without sequence parallelism, which cannot cut one token, nor FP8, whose
    products need 16: as servers do, the engine samples in the weights' own precision.

    On exit, modes, flags and every replaced `forward` are restored.
    """
    training = [chunk.training for chunk in chunks]
    fp8: list[Any] = [chunk.config.fp8 for chunk in chunks]
    modules = [module for chunk in chunks for module in chunk.modules()]
    flags: list[tuple[Any, str]] = []
    for module in modules:
        flags += _switched_off(module) + _switched_off(getattr(module, "config", None))
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            vars(layer)["forward"] = partial(_layer_forward, layer)
        for module in chunk.decoder.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                weight: Any = module.weight
                vars(module)["forward"] = partial(_linear_forward, module, packed(weight))
        chunk.eval()
        chunk.config.fp8 = None
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)
        for owner, name in flags:
            setattr(owner, name, True)
        for chunk, mode, recipe in zip(chunks, training, fp8, strict=True):
            chunk.train(mode)
            chunk.config.fp8 = recipe


def _switched_off(owner: Any) -> list[tuple[Any, str]]:
    """Set a module's or config's sequence-parallel flags to False; returns those that were True."""
    names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
    flags = [(owner, name) for name in names if getattr(owner, name, False) is True]
    for _, name in flags:
        setattr(owner, name, False)
    return flags


def _send(hidden: Tensor, world: World) -> None:
    target = (world.pipeline_rank + 1) % world.pipeline_size
    dist.send(hidden.contiguous(), group=world.pipeline_group, group_dst=target)


def _receive(hidden: Tensor, world: World) -> None:
    source = (world.pipeline_rank - 1) % world.pipeline_size
    dist.recv(hidden, group=world.pipeline_group, group_src=source)
