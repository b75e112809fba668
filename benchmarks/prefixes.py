"""What `train.share_prefixes` saves: seconds and saved tensors of a forward and a backward pass.

    .venv/bin/python -m benchmarks.prefixes [--tokens 2048] [--rounds 3]
    .venv/bin/python -m benchmarks.prefixes --smoke   # tiny sequences, to see that it runs

Samples of random tokens through a Qwen3 of 4 layers x 256, fp32, all in micro-batches of 16,384
tokens: groups of rollouts whose prompts and responses are as 1:4, 1:1 and 4:1, --tokens together;
and a coding agent's episodes, four each, whose context is compacted three times: each context
begins with a quarter, a half or three quarters of the one before. Whole sequences and shared ones
take turns. On stdout a Markdown table of ratios, shared over whole: tokens computed; CPU seconds of
scoring (forward) and of training (forward and backward), least of the rounds; bytes that autograd
saves. Both are checked to give the same hidden states.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, forward_hidden
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import MicroBatch, Sample
from stable_opd_mcore.sample_facts import SampleWeights

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
KEPT = (0.25, 0.5, 0.75)  # of an agent's context when it is compacted


def rollouts(tokens: int, prompt: float, group: int, count: int) -> list[list[int]]:
    """`count` sequences of so many tokens; those of a group have the prompt in common."""
    length = round(tokens * prompt)
    sequences: list[list[int]] = []
    while len(sequences) < count:
        shared = _random(length)
        sequences += [shared + _random(tokens - length) for _ in range(group)]
    return sequences[:count]


def agent(tokens: int, episodes: int) -> list[list[int]]:
    """Episodes of one task, each with a context for each compaction and one before."""
    task = _random(tokens // 8)
    sequences: list[list[int]] = []
    for _ in range(episodes):
        context = task + _random(tokens - len(task))
        sequences.append(context)
        for share in KEPT:
            kept = round(tokens * share)
            context = context[:kept] + _random(tokens - kept)
            sequences.append(context)
    return sequences


def _random(count: int) -> list[int]:
    return random.choices(range(1, CONFIG["vocab_size"]), k=count)


def packed(sequences: Sequence[Sequence[int]], max_tokens: int, shares: bool) -> list[MicroBatch]:
    """All sequences, the last quarter of each sampled."""
    samples = []
    for number, ids in enumerate(sequences):
        token_ids, start = np.array(ids, np.int32), len(ids) * 3 // 4
        places = np.arange(start, len(ids), dtype=np.int32)
        trained = np.ones(len(places), np.bool_)
        samples.append(Sample("rollout", str(number), token_ids, places, start, trained, None))
    weights = SampleWeights(*np.ones((3, len(samples))))
    return pack(samples, weights, max_tokens=max_tokens, share_prefixes=shares)


def rows_of(chunk: HiddenStatesGPTModel, batches: Sequence[MicroBatch]) -> Tensor:
    """Hidden states of the loss rows in the order of samples and tokens: [rows, H]."""
    rows = [forward_hidden(chunk, batch).index_select(0, batch.rows_N) for batch in batches]
    numbers = [batch.sample_index_N * 2**20 + batch.token_index_N for batch in batches]
    return torch.cat(rows)[torch.cat(numbers).argsort()]


def trained(chunk: HiddenStatesGPTModel, batches: Sequence[MicroBatch]) -> int:
    """Forward and backward of each micro-batch; the most bytes that one saves."""
    largest = 0
    for batch in batches:
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = forward_hidden(chunk, batch).index_select(0, batch.rows_N).square().sum()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        largest = max(largest, sum(saved.values()))
    return largest


def seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(
    chunk: HiddenStatesGPTModel, sequences: list[list[int]], max_tokens: int, rounds: int
) -> list[float]:
    """Shared over whole: tokens, seconds of scoring and of training, saved bytes."""
    both = [packed(sequences, max_tokens, shares) for shares in (False, True)]
    with torch.no_grad():
        torch.testing.assert_close(*(rows_of(chunk, batches) for batches in both))
    figures: list[list[float]] = []
    for batches in both:
        figures.append([sum(len(batch.tokens_T) for batch in batches), np.inf, np.inf, 0])
    for _ in range(rounds):
        for batches, figure in zip(both, figures, strict=True):
            with torch.no_grad():
                scoring = seconds(lambda batches=batches: rows_of(chunk, batches))
            figure[1] = min(figure[1], scoring)
            figure[2] = min(figure[2], seconds(lambda batches=batches: trained(chunk, batches)))
            figure[3] = trained(chunk, batches)
    return [shared / whole for whole, shared in zip(*figures, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--count", type=int, default=16, help="sequences of a case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="tiny sequences")
    given = parser.parse_args()
    random.seed(0)
    torch.set_num_threads(1)
    if given.smoke:
        given.tokens, given.count, given.rounds = 64, 4, 1
    tokens, count = given.tokens, given.count
    cases = {
        f"prompt : response {name}, groups of {group}": rollouts(tokens, prompt, group, count)
        for name, prompt in (("1 : 4", 0.2), ("1 : 1", 0.5), ("4 : 1", 0.8))
        for group in (1, 8, 16)
    }
    cases |= {"a coding agent's contexts": agent(tokens, count // 4)}
    world = start_world(ParallelConfig(), 0)
    (chunk,) = build_model(read_architecture(CONFIG), world, seed=0)
    print("| samples | tokens | scoring s | training s | saved bytes |\n|---|---|---|---|---|")
    for name, sequences in cases.items():
        ratios = compare(chunk, sequences, 8 * tokens, given.rounds)
        print(f"| {name} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |", flush=True)
    stop_world()


if __name__ == "__main__":
    main()
