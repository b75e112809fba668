"""One rank's setup, step and publish in a fake world.

    report = rehearse_rank(config, gpus=64, rank=0, vocab_size=151665)

`train.setup.build_run` and `train.step.train_step` run as they are. `_absent` replaces what a
machine without models, data and servers lacks: weights are random, prompts and responses are as
long as the config allows, and the loss's kernels only make their outputs. Not here: which worlds
are rehearsed (worlds.py).
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads
from torch import Tensor

from stable_opd_mcore.commands.plan.planned_run import PRIVILEGED_TOKENS
from stable_opd_mcore.commands.rehearse.fake_tensors import fake_tensors
from stable_opd_mcore.commands.rehearse.fake_world import fake_world
from stable_opd_mcore.commands.rehearse.host_waits import HostWaits
from stable_opd_mcore.commands.rehearse.replacing import replaced
from stable_opd_mcore.config.data import TrainSource
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.sources import source_name
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.losses import output_head, torch_ops
from stable_opd_mcore.losses.output_head import accumulation_dtype
from stable_opd_mcore.metrics import Metrics, Sum
from stable_opd_mcore.models.layers import gated_delta_net
from stable_opd_mcore.models.lora import base_only
from stable_opd_mcore.models.weights import architecture_of, iter_hf_tensors
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.placement.topology import WEIGHT_BUCKET_BYTES, sends_adapter
from stable_opd_mcore.records import Prompt, Rollout, Sampling, SequenceScores
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.rollout.sglang.sync import make_buckets
from stable_opd_mcore.rollout.sglang.transports import Buffers
from stable_opd_mcore.serving import teacher
from stable_opd_mcore.serving.requests import Scoring
from stable_opd_mcore.train import reference, run_models, setup, step, update
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.samples import collecting, served_scores, sharing


@dataclass(frozen=True)
class RankReport:
    """One rank's rehearsal."""

    stage: int
    seconds: float  # CPU time
    peak_bytes: int  # the step's, with Adam's state
    published_bytes: int  # sent to a server in one publish; 0 where nothing is sent
    host_waits: dict[str, int]  # places where the step's host waits for the GPU -> how often


def rehearse_rank(
    config: Config, gpus: int, rank: int, *, prompt_tokens: int, vocab_size: int
) -> RankReport:
    """Do what rank `rank` of `gpus` does: build the run, train one step, gather the weights."""
    start = time.process_time()
    # Values of single tokens leave the device, and tensors without memory have none.
    config = config.replaced(rollout={"save": "none"})
    with (
        fake_world(config.parallel, gpus, rank) as world,
        fake_tensors() as live,
        _absent(inputs := _Inputs(config, prompt_tokens, vocab_size)),
    ):
        run, state = setup.build_run(inputs.as_run_inputs(), world), TrainState()
        run.student.zero_grad()
        run.student.finish_grads()
        run.student.update(lr=0.0)  # Adam's state exists from the first update on
        live.restart()
        with HostWaits() as waits:
            step.train_step(run, state)
        engine: Any = run.engine
        return RankReport(
            stage=world.pipeline_rank,
            seconds=time.process_time() - start,
            peak_bytes=live.peak_bytes,
            published_bytes=engine.published_bytes,
            host_waits=dict(waits.places),
        )


@dataclass(frozen=True)
class _Inputs:
    """The longest prompts and responses that the config allows, in place of data and tokenizer."""

    config: Config
    prompt_tokens: int
    vocab_size: int
    teacher: None = None  # of prompts: encoded here

    @property
    def window(self) -> int:
        """Prompt and response fill it, so no turn of `rollout.prefix` comes before them."""
        return self.prompt_tokens + self.config.longest_turn

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.config.student.stop_token_ids or (self.vocab_size - 1,)

    def decode(self, token_ids: Sequence[int]) -> str:  # noqa: ARG002
        return ""

    def __len__(self) -> int:
        return len(self.source_names())

    def as_run_inputs(self) -> RunInputs:
        """These in the place of what a run's files say."""
        inputs = RunInputs(self.config)
        stops = None if self.config.teacher is None else self.stop_token_ids
        inputs.parts |= {"tokenizer": self, "teacher_tokenizer": None, "teacher_stops": stops}
        named = self.config.teacher.models if self.config.teacher else ()
        inputs.parts["named_stops"] = dict.fromkeys(named, self.stop_token_ids)
        inputs.parts |= {"prompts": self, "held_out": None}
        return inputs

    def source_names(self) -> list[str]:
        """The source of each prompt; every source has those of a whole step."""
        return [source_name(each) for each in self._sources()]

    def _sources(self) -> list[TrainSource]:
        per_step = range(self.config.rollout.prompts_per_step)
        return [each for each in self.config.data.sources for _ in per_step]

    def select(self, indices: Sequence[int]) -> list[Prompt]:
        """See `PromptSet.select`."""
        response, sources = self.response(), self._sources()
        settings = self.config.teacher
        has_own = settings is not None and settings.prompt is not None
        own = (0,) * (self.prompt_tokens + PRIVILEGED_TOKENS) if has_own else None
        return [
            Prompt(
                f"{source_name(sources[i])}:{i}",
                "",
                (0,) * self.prompt_tokens,
                golden_token_ids=response if sources[i].may_have_golden else None,
                teacher_token_ids=own,
            )
            for i in indices
        ]

    def response(self) -> tuple[int, ...]:
        usable = max(1, self.vocab_size - len(self.stop_token_ids))
        return tuple(i % usable for i in range(self.config.longest_turn))


class _Engine(RolloutEngine):
    """Truncates all responses at the limit, and does not send the weights."""

    def __init__(self, inputs: _Inputs, world: World, chunks: Sequence[Any]) -> None:
        self.weight_version = 0
        self.published_bytes = 0
        self._inputs, self._world, self._chunks = inputs, world, chunks
        self._buffers = Buffers()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        response = np.array(self._inputs.response(), np.int32)
        logprobs = np.zeros(len(response), np.float32)
        return [
            Rollout(prompt, i, response, logprobs, Ending.LENGTH, step, reward=0.0)
            for prompt in prompts
            for i in range(sampling.num_samples)
        ]

    def publish(self, weight_version: int) -> None:
        """Gather every tensor over this replica, and pack the buckets on the sending rank."""
        self.weight_version = weight_version
        config = self._inputs.config
        if not config.rollout.has_servers or self._world.data_rank > 0:
            return
        is_adapter = sends_adapter(config, architecture_of(self._chunks))
        with base_only(self._chunks) if is_adapter else nullcontext():
            if self._world.rank > 0:
                for _ in iter_hf_tensors(self._chunks):
                    pass
                return
            dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
            buckets = make_buckets(self._chunks, dtype, WEIGHT_BUCKET_BYTES, self._buffers)
            self.published_bytes = sum(bucket.flat.numel() for bucket in buckets)


@dataclass(eq=False)
class _TeacherServer:
    """An `SglangClient` whose server gives every token probability 1."""

    url: str
    _: KW_ONLY
    api_key: str | None = None

    def submit(self, request: Scoring, *unused: Any) -> Future[SequenceScores]:
        size, top_k = len(request.token_ids) - request.start, request.top_k
        reply: Future[SequenceScores] = Future()
        reply.set_result(
            SequenceScores(
                np.zeros(size, np.float32),
                np.tile(np.arange(top_k, dtype=np.int32), (size, 1)),
                np.zeros((size, top_k), np.float16),
                np.zeros((size, len(request.extra_ids)), np.float32),
            )
        )
        return reply


@contextmanager
def _absent(inputs: _Inputs) -> Iterator[None]:
    """Put `inputs` where the trainer reads tokenizer, data and rollouts."""

    def build_engine(_config: Config, world: World, chunks: Sequence[Any], *unused: Any) -> _Engine:
        return _Engine(inputs, world, chunks)

    of_loss = {
        "shard_sums": lambda logits_CV, other_CV, *unused: torch_ops.ShardSums.zeros(
            logits_CV, other_CV
        )[0],
        "jsd_sums": _jsd_sums,
        "write_gradient_": lambda *unused: None,
    }
    with (
        replaced(setup, build_engine=build_engine),
        replaced(teacher, SglangClient=_TeacherServer, read_api_key=lambda _: None),
        replaced(run_models, read_weights=lambda *unused: None),
        replaced(reference, read_weights=lambda *unused: None),
        replaced(torch_ops, **of_loss),
        replaced(gated_delta_net, delta_rule=_delta_rule),
        replaced(output_head, MAX_CPU_BLOCK_ELEMENTS=2**62),  # blocks as on a GPU
        replaced(clip_grads, l2_norm_impl=lambda *unused: (torch.ones(1), None)),
        replaced(collecting, own_share=lambda _world, items: items),  # all ranks'
        replaced(served_scores, dist=SimpleNamespace(get_rank=lambda _: 0)),  # it asks
        replaced(sharing, gather_objects=lambda item, _group: [item], exchange_objects=_kept),
        replaced(DeviceMemory, keep_only=lambda *unused: None),  # teachers in turn have no bytes
        replaced(step, reduce_row_metrics=_row_metrics),
        replaced(update, reduce_row_metrics=_row_metrics),
    ):
        yield


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, *unused: Any
) -> tuple[Tensor, Tensor]:
    """Outputs like those of `delta_rule`, in a few operations.

    Its loop over chunks dispatches thousands, and takes minutes with fake tensors.
    """
    factor_NLV1 = (query * key).float().sum(dim=-1, keepdim=True) * (decay + beta).unsqueeze(-1)
    state_NVDE = key.new_zeros(len(key), *key.shape[2:], value.shape[-1], dtype=torch.float32)
    return value * factor_NLV1, state_NVDE


def _kept(outgoing: Sequence[Any], group: dist.ProcessGroup) -> list[Any]:
    """What comes from each rank of `group`, where this rank holds the samples of all."""
    return [items if rank == group.rank() else [] for rank, items in enumerate(outgoing)]


def _row_metrics(world: World, metrics: Metrics) -> Metrics:  # noqa: ARG001
    """Off the last stage, the loss comes from the last stage."""
    return metrics or Metrics({"loss/total": Sum(1.0)})


def _jsd_sums(logits_CV: Tensor, *unused: Any) -> Tensor:
    return logits_CV.new_zeros(len(logits_CV), 2, dtype=accumulation_dtype(logits_CV))
