"""The advantages, teacher log-probabilities and KLs of single tokens of a step's first rollouts.

They are kept for readers and do not enter the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.token_files import VALUES, Numbers, TokenText, write_tokens
from stable_opd_mcore.losses.token_weights import by_episode
from stable_opd_mcore.parallel.transfers import OnHost
from stable_opd_mcore.parallel.world import World, gather_on_first_rank
from stable_opd_mcore.records import LossOutput, MicroBatch, Rollout
from stable_opd_mcore.sample_facts import SampleFacts
from stable_opd_mcore.train.samples.sharing import Minibatch

NUM_ROLLOUTS = 8  # rollouts of each step, about 35 bytes a token


@dataclass(frozen=True)
class RolloutValues:
    rollout: Rollout
    values: Numbers


class TokenRecorder:
    """Keeps the token values of the first NUM_ROLLOUTS rollouts of a step.

    Args:
        facts: those of all samples of the step; the rollouts stand first, in order.
    """

    def __init__(self, config: Config, facts: SampleFacts):
        count = 0 if config.rollout.save == "none" else NUM_ROLLOUTS
        samples = facts.select(~facts.golden_B)
        rollouts, self._rollout_B = by_episode(samples)
        self._kept = rollouts.select(np.s_[:count])
        lengths = (samples.sampled_tokens_B, rollouts.sampled_tokens_B)
        starts_B, starts = (np.cumsum(counts) - counts for counts in lengths)
        self._first_token_B = starts_B - starts[self._rollout_B]  # of the sample in its rollout
        self._rows: list[tuple[Minibatch, OnHost]] = []  # one per micro-batch

    def record(
        self,
        minibatch: Minibatch,
        micro_batches: Sequence[MicroBatch],
        outputs: Sequence[LossOutput],
    ) -> None:
        """Keep a minibatch's token values; `outputs` are empty off the last pipeline stage."""
        if not len(self._kept) or not outputs:
            return
        for micro_batch, output in zip(micro_batches, outputs, strict=True):
            self._rows.append((minibatch, _rows(output, micro_batch)))

    def gather(self, world: World, rollouts: Sequence[Rollout]) -> list[RolloutValues]:
        """Each kept rollout and its values, on rank 0; empty on other ranks. Collective.

        A value that is 0 everywhere was not computed and is left out: a run without reference has
        no KL to it.
        """
        if not len(self._kept):
            return []
        # All tensor-parallel ranks hold the same rows, and all ranks of a replica its rollouts.
        own_rows = self._own_rows() if world.tensor_rank == 0 else []
        here = self._kept.holder_B == world.data_rank
        own = [] if dist.get_rank(world.model_group) else np.flatnonzero(here).tolist()
        own_rollouts = dict(zip(own, rollouts, strict=False))  # the first ones of this rank
        everywhere = gather_on_first_rank((own_rows, own_rollouts))
        if world.rank != 0:
            return []
        rows = np.concatenate([part for parts, _ in everywhere for part in parts], axis=1)
        kept = {place: rollout for _, part in everywhere for place, rollout in part.items()}
        computed = [key for key, values in zip(VALUES, rows[2:], strict=True) if values.any()]
        return [
            RolloutValues(
                kept[place],
                {
                    key: _spread(rows, place, VALUES.index(key), len(kept[place].token_ids))
                    for key in computed
                },
            )
            for place in range(len(self._kept))
        ]

    def _own_rows(self) -> list[np.ndarray]:
        """An array for each micro-batch. Its columns are the kept rollouts' rows: rollout, token,
        VALUES."""
        kept: list[np.ndarray] = []
        for minibatch, copied in self._rows:
            rows = copied.values().numpy()
            places = minibatch.places[rows[0].astype(np.int64)]
            is_of_rollout = places < len(self._rollout_B)  # they stand first
            rows, places = rows[:, is_of_rollout], places[is_of_rollout]
            rows[0] = self._rollout_B[places]
            rows[1] += self._first_token_B[places]
            kept.append(rows[:, rows[0] < len(self._kept)])
        return kept


def write_token_values(path: Path, values: Sequence[RolloutValues], tokenizer: Tokenizer) -> None:
    texts: list[TokenText] = []
    for of in values:
        ids = of.rollout.prompt.golden_token_ids
        lengths = [turn.num_tokens for turn in of.rollout.turns]
        turns = np.split(of.rollout.token_ids, np.cumsum(lengths)[:-1])
        text = TokenText(
            prompt_id=of.rollout.prompt.prompt_id,
            sample_index=of.rollout.sample_index,
            pieces=tuple(piece for ids in turns for piece in tokenizer.pieces(ids.tolist())),
            values=of.values,
            golden=None if ids is None else tokenizer.decode(ids),
        )
        texts.append(text)
    if texts:
        write_tokens(path, texts)


def _rows(output: LossOutput, batch: MicroBatch) -> OnHost:
    """Sample index, token index and VALUES of the micro-batch's tokens: [2 + values, N]."""
    advantage_N = output.advantage_N
    columns = (
        batch.sample_index_N,
        batch.token_index_N,
        torch.zeros_like(output.kl_teacher_N) if advantage_N is None else advantage_N,
        output.teacher_logprob_N,
        output.kl_reference_N,
        output.kl_teacher_N,
    )
    return OnHost(torch.stack([column.detach().double() for column in columns]))


def _spread(rows: np.ndarray, rollout: int, value: int, length: int) -> list[float | None]:
    """One value for each token of a rollout of `length`; None for tokens without one.

    Args:
        rows: [2 + values, tokens]: the token's rollout, its place there, and its values.
    """
    mine = rows[:, rows[0] == rollout]
    spread: list[float | None] = [None] * length
    for token, number in zip(
        mine[1].astype(np.int64).tolist(), mine[2 + value].tolist(), strict=True
    ):
        spread[token] = number
    return spread
