"""Rollouts from the student's own Megatron model chunks.

Each distinct context of a batch is run once; its keys and values are then repeated for its samples,
and all rows are decoded one token a step. Finished rows leave the batch. A token's noise depends
only on seed, step, prompt, sample and position (noise.py), so batch size, other rows and the
parallel layout do not change what is sampled. A next turn is decoded from its whole context again.

Megatron's layers run without its model around them (inference.py), and with their own cache of keys
and values (kv_cache.py): Megatron's static cache rotates every cached key again at each step (2.4
times the whole step's cost at 4 layers of 256), has no mask for padding after the prompt, and
cannot drop rows. The trained weights themselves are read, so `publish` sends nothing.

Replicas that share experts run every forward pass together: one that has no row left runs a token
of padding until all have finished.

`prefetch` decodes at once, in the trainer's own process: it saves no time, but rollouts are as old
as those of servers would be, and the same in every run. A response that continues after an update
is decoded again from its prompt and tokens, so the new weights read its old tokens.

Letters: P contexts, R rows of one batch, one an episode, B rows still running, L new tokens, T
tokens of a row in one forward pass, H hidden size, D half the size of a head, V vocabulary, S its
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from math import ceil

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from numpy.typing import NDArray
from torch import Tensor

from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Metrics
from stable_opd_mcore.models.hidden_states import HiddenStatesGPTModel, output_head
from stable_opd_mcore.parallel.world import World, broadcast_object
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.engine import RolloutEngine, check_prompts
from stable_opd_mcore.rollout.episodes import Episode, WhatFollows
from stable_opd_mcore.rollout.inference import inference_mode, product, run_layers
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.rollout.kv_cache import KVCache
from stable_opd_mcore.rollout.noise import Sampler, row_key, sample_rows

# Finished rows are dropped when at most this share of the batch is still running. Between 0.75 and
# 0.9 the time is the same; never dropping takes three times as long on a long-tailed batch.
_COMPACT_BELOW = 0.85
_GATHERING_SECONDS = 0.02  # agents that ask at the same time are decoded together


@dataclass(eq=False)
class EmbeddedEngine(RolloutEngine):
    """A `RolloutEngine` over model chunks; UserError if they have fewer than `vocab_size` ids."""

    chunks: Sequence[torch.nn.Module]  # this rank's, with or without gradient wrapper
    world: World
    decode: Callable[[Sequence[int]], str]  # token ids (no stop token) to text
    _: KW_ONLY
    vocab_size: int  # the tokenizer's, of student and teacher; larger ids are never sampled
    max_rows: int = 256  # responses decoded at once; more are sampled in several batches
    progress: Callable[[], None] = lambda: None  # called after each decoded token of the batch
    max_staleness: int = 0  # rollout.max_staleness
    partial: bool = False  # rollout.partial
    interaction: Interaction = field(default_factory=Interaction)  # answers the student's turns
    sampler: Sampler = sample_rows  # picks the next token of each row; see noise.py

    def __post_init__(self) -> None:
        self._chunks: list[HiddenStatesGPTModel] = unwrap_model(list(self.chunks))
        self._head = output_head(self._chunks)
        architecture = self._chunks[0].architecture
        if architecture.vocab_size < self.vocab_size:
            raise UserError(
                f"the student has {architecture.vocab_size} vocabulary entries, fewer than the "
                f"{self.vocab_size} of its tokenizer, which belongs to another model: set "
                "tokenizer.path to the student's"
            )
        self._window = architecture.max_positions
        # episodes sampled ahead by step, finished or not; evaluations differ in sampling or step
        self._ahead: dict[tuple[int, Sampling], list[Episode]] = {}

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`. All ranks of the replica call it together."""
        check_prompts(prompts, sampling, vocab_size=self.vocab_size, window=self._window)
        episodes = self._continue(prompts, sampling, step)
        return [episode.rollout() for episode in episodes]

    def prefetch(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int, weight_version: int
    ) -> None:
        """Sample the step's rollouts to the end, or with `partial` to their share of the budget.

        With weights that are n updates older than `weight_version` that share is
        (max_staleness + 1 - n) / (max_staleness + 1), so each version samples a segment. A call
        that is repeated with the same weights changes nothing.
        """
        check_prompts(prompts, sampling, vocab_size=self.vocab_size, window=self._window)
        share = Fraction(1)
        if self.partial:
            pieces = self.max_staleness + 1
            share = Fraction(pieces - weight_version + self.weight_version, pieces)
        self._ahead[step, sampling] = self._continue(prompts, sampling, step, share)

    def drop_ahead(self) -> None:
        for (step, sampling), episodes in self._ahead.items():
            self.interaction.forget(episodes, sampling, step)
        self._ahead.clear()

    def take_metrics(self) -> Metrics:
        return self.interaction.take_metrics()

    def close(self) -> None:
        self.interaction.close()

    def _continue(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        step: int,
        share: Fraction = Fraction(1),
    ) -> list[Episode]:
        """The step's episodes, decoded until each ends or has a turn with this share of its limit.
        They continue what was sampled ahead."""
        episodes = self._ahead.pop((step, sampling), None) or [
            Episode.begin(prompt, sample, self.weight_version)
            for prompt in prompts
            for sample in range(sampling.num_samples)
        ]
        asked: dict[int, Future[WhatFollows]] = {}
        episodes = self._after_turns(episodes, sampling, step, asked)
        limits = self._limits(episodes, sampling, share)
        if not self._some_replica_runs(bool(limits)):
            return episodes
        with inference_mode(self._chunks):
            while limits:  # another turn of each episode that has one
                places = list(limits)
                for start in range(0, len(places), self.max_rows):
                    batch = places[start : start + self.max_rows]
                    self._extend(episodes, {n: limits[n] for n in batch}, sampling, step)
                episodes = self._after_turns(episodes, sampling, step, asked)
                limits = self._limits(episodes, sampling, share)
            while self._some_replica_runs(False):
                padding_BT = torch.zeros(1, 1, dtype=torch.int64, device=self.world.device)
                self._run(padding_BT, self._new_cache([1], 1))
        return episodes

    def _limits(
        self, episodes: Sequence[Episode], sampling: Sampling, share: Fraction
    ) -> dict[int, int]:
        """Place of each open turn that gets more tokens -> how many, up to `share` of its limit."""
        limits: dict[int, int] = {}
        for place, episode in enumerate(episodes):
            if episode.is_open:
                left = ceil(share * episode.limit(sampling)) - episode.turns[-1].num_tokens
                limit = min(left, episode.budget(sampling, self._window))
                if limit > 0:
                    limits[place] = limit
        return limits

    def _after_turns(
        self,
        episodes: Sequence[Episode],
        sampling: Sampling,
        step: int,
        asked: dict[int, Future[WhatFollows]],
    ) -> list[Episode]:
        """Give the episodes whose turns are over what follows, until all are open or ended.

        With agents only until one is open, because an agent may wait for another's episode. The
        answers that have not come yet stay in `asked`, by the episode's place.
        """
        episodes = list(episodes)
        while waiting := [n for n, each in enumerate(episodes) if each.awaits_observation]:
            is_idle = not any(each.is_open for each in episodes)
            answers = self._observed(episodes, waiting, sampling, step, asked, is_idle)
            for place, answer in answers.items():
                episodes[place] = episodes[place].after(answer)
            if not answers:
                break
        return episodes

    def _observed(
        self,
        episodes: Sequence[Episode],
        waiting: Sequence[int],
        sampling: Sampling,
        step: int,
        asked: dict[int, Future[WhatFollows]],
        is_idle: bool,
    ) -> dict[int, WhatFollows]:
        """What follows the turns at these places; with agents only what is known already, or, if
        the engine is idle, what is known first. The replica's first rank asks, so that all ranks
        agree."""
        has_environment = any(episodes[n].prompt.environment is not None for n in waiting)
        answers: dict[int, WhatFollows] | UserError = {}
        if not has_environment or dist.get_rank(self.world.model_group) == 0:
            for n in waiting:
                if n not in asked:
                    asked[n] = self.interaction.observe(episodes[n], sampling, step)
            try:
                if self.interaction.has_agents:
                    wait(asked.values(), None if is_idle else 0, FIRST_COMPLETED)
                    wait(asked.values(), _GATHERING_SECONDS)
                for n in waiting:
                    if not self.interaction.has_agents or asked[n].done():
                        answers[n] = asked.pop(n).result()
                        self.progress()
            except UserError as error:
                answers = error
        if has_environment:
            answers = broadcast_object(answers, self.world.model_group)
        if isinstance(answers, UserError):
            raise answers
        return answers

    def _extend(
        self, episodes: list[Episode], limits: Mapping[int, int], sampling: Sampling, step: int
    ) -> None:
        """Replace the episodes at some places by longer ones, decoded together."""
        contexts: list[tuple[int, ...]] = []
        rows: list[tuple[int, ...]] = []
        for place, limit in limits.items():  # samples of one prompt are adjacent
            episode = episodes[place]
            context = tuple(episode.context.tolist())
            if not contexts or contexts[-1] != context:
                contexts.append(context)
            key = row_key(sampling.seed, step, episode.prompt.prompt_id, episode.sample_index)
            rows.append((len(contexts) - 1, key, len(episode.token_ids), limit))
        rows_4R = torch.tensor(rows, dtype=torch.int64, device=self.world.device).T
        tokens_RL, logprobs_RL = self._decode_rows(contexts, rows_4R, sampling)
        decoded = zip(
            limits.items(), tokens_RL.cpu().numpy(), logprobs_RL.cpu().numpy(), strict=True
        )
        for (place, limit), tokens_L, logprobs_L in decoded:
            new = tokens_L[:limit], logprobs_L[:limit]
            episodes[place] = self._with_tokens(episodes[place], *new, sampling)

    def _with_tokens(
        self,
        episode: Episode,
        tokens_L: NDArray[np.int64],
        logprobs_L: NDArray[np.float32],
        sampling: Sampling,
    ) -> Episode:
        """The episode with the tokens up to the first stop token."""
        stops = np.flatnonzero(np.isin(tokens_L, sampling.stop_token_ids))
        length = int(stops[0]) + 1 if len(stops) else len(tokens_L)
        is_full = length == episode.budget(sampling, self._window)
        reason = Ending.STOP if len(stops) else Ending.LENGTH if is_full else Ending.OPEN
        token_ids = tokens_L[:length].astype(np.int32)
        begun = len(episode.token_ids) - episode.turns[-1].num_tokens
        of_turn = [*episode.token_ids[begun:].tolist(), *token_ids.tolist()]
        text = self.decode(of_turn[:-1] if reason == Ending.STOP else of_turn)
        logprobs, version = logprobs_L[:length], self.weight_version
        return episode.with_tokens(token_ids, logprobs, reason, version, text=text)

    def _decode_rows(
        self, contexts: Sequence[tuple[int, ...]], rows_4R: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        """The decode loop: tokens and log-probabilities [R, L], undefined after a stop token and
        after the row's limit.

        rows_4R: int64, each row's context, key, position of its first new token, and limit.
        """
        context_R, keys_B, positions_B, left_B = rows_4R.unbind()
        num_rows, num_tokens, device = len(keys_B), int(left_B.max()), self.world.device
        tokens_RL = torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=device)
        logprobs_RL = torch.zeros(num_rows, num_tokens, device=device)
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)

        cache = self._new_cache([len(context) for context in contexts], num_tokens)
        hidden_BH = self._forward(_left_padded(contexts, device), cache)
        if len(contexts) < num_rows:
            cache.select(context_R)
            hidden_BH = None if hidden_BH is None else hidden_BH[context_R]

        running_B = torch.arange(num_rows, device=device)
        done_B = torch.zeros(num_rows, dtype=torch.bool, device=device)
        for column in range(num_tokens):
            tokens_B, logprobs_B = self._sample(hidden_BH, keys_B, positions_B + column, sampling)
            self.progress()
            tokens_RL[running_B, column] = tokens_B
            logprobs_RL[running_B, column] = logprobs_B
            is_stop_B = (tokens_B[:, None] == stop_ids).any(dim=1)
            done_B = done_B | is_stop_B | (column + 1 == left_B)
            num_running = len(done_B) - int(done_B.sum())
            if num_running == 0:
                break
            if num_running <= _COMPACT_BELOW * len(done_B):
                alive = (~done_B).nonzero()[:, 0]
                cache.select(alive)
                running_B, keys_B, positions_B, left_B, tokens_B, done_B = (
                    x[alive] for x in (running_B, keys_B, positions_B, left_B, tokens_B, done_B)
                )
            hidden_BH = self._forward(tokens_B[:, None], cache)
        return tokens_RL, logprobs_RL

    def _new_cache(self, lengths: list[int], max_new_tokens: int) -> KVCache:
        chunk = self._chunks[0]
        positions_P = torch.arange(max(lengths) + max_new_tokens, dtype=torch.float32)
        angles = [
            torch.outer(positions_P, rotary.frequencies()).to(self.world.device)
            for rotary in chunk.architecture.rotaries()
        ]
        return KVCache(lengths, angles, chunk.config.params_dtype)

    def _some_replica_runs(self, this_one: bool) -> bool:
        """Whether this replica or one that shares its experts runs a pass now. Collective."""
        if self.world.coupled_replicas == 1:
            return this_one
        running = torch.tensor(int(this_one), device=self.world.device)
        dist.all_reduce(running, op=dist.ReduceOp.MAX, group=self.world.groups.ep)
        return bool(running)

    def _forward(self, tokens_BT: Tensor, cache: KVCache) -> Tensor | None:
        """`_run`, when the other replicas are ready for it too."""
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
        group = self.world.groups.pp  # virtual stages go round in it
        rank, size = self.world.pipeline_rank, self.world.pipeline_size
        cache.begin(num_tokens)
        for chunk in self._chunks:
            if chunk.pre_process:
                hidden_TBH = chunk.embedding(tokens_BT, None)
            else:
                dist.recv(hidden_TBH, group=group, group_src=(rank - 1) % size)
            hidden_TBH = run_layers(chunk, hidden_TBH, cache)
            if not chunk.post_process:
                hidden_TBH = hidden_TBH.contiguous()
                dist.send(hidden_TBH, group=group, group_dst=(rank + 1) % size)
        cache.end()
        return hidden_TBH[-1] if self.world.is_last_stage else None

    def _sample(
        self, hidden_BH: Tensor | None, keys_B: Tensor, positions_B: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        """Sample on the last stage and broadcast to the replica: tokens_B, logprobs_B."""
        sampled_2B = torch.empty(2, len(keys_B), dtype=torch.float64, device=keys_B.device)
        if hidden_BH is not None:
            logits_BV = self._logits(hidden_BH)
            tokens_B, logprobs_B = self.sampler(logits_BV, keys_B, positions_B, sampling)
            if self.world.model_group.size() == 1:
                return tokens_B, logprobs_B
            sampled_2B = torch.stack((tokens_B.double(), logprobs_B.double()))
        # Sample on one rank and broadcast, because other ranks may round differently.
        last_stage = (self.world.pipeline_size - 1) * self.world.tensor_size
        dist.broadcast(sampled_2B, group=self.world.model_group, group_src=last_stage)
        return sampled_2B[0].long(), sampled_2B[1].float()

    def _logits(self, hidden_BH: Tensor) -> Tensor:
        """fp32 logits of the common vocabulary [B, V], gathered over the head's shards."""
        head = self._head
        assert head is not None
        logits_SBV = head.gather(product(hidden_BH, head.weight_VH))
        return logits_SBV.transpose(0, 1).flatten(1)[:, : self.vocab_size].float()


def _left_padded(contexts: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Token ids [P, T], int64, each context's last token in the last column."""
    longest = max(map(len, contexts))
    rows = [(0,) * (longest - len(context)) + context for context in contexts]
    return torch.tensor(rows, dtype=torch.int64, device=device)
