"""The router of DeepSeek-V3: sigmoid scores, and a bias that only the choice of experts reads.

Megatron's takes other groups unless twice as many experts as groups are chosen, always divides by
the sum of the scores, and moves the bias after each step. Here the bias is never moved: it is part
of the model as the teacher's vocabulary is, and a parameter without a gradient, so that files,
checkpoints, hashes and publishes hold it as they hold weights. transformers' class
DeepseekV3TopkRouter is the definition.

Letters: T tokens, E experts, X chosen experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from stable_opd_mcore.models.description.expert_settings import Experts


class ScoredRouter(TopKRouter):
    """Megatron's router with another choice of experts and other probabilities."""

    def __init__(self, config: Any, *, experts: Experts, **options: Any) -> None:
        super().__init__(config=config, **options)
        self._experts = experts
        self.choice_bias = torch.nn.Parameter(torch.zeros(experts.number), requires_grad=False)

    def routing(self, logits: Tensor, *_: Any, **unused: Any) -> tuple[Tensor, Tensor]:
        """Probabilities and bool [T, E] of the chosen experts."""
        scores_TE = logits.view(-1, self._experts.number).float().sigmoid()
        biased_TE = scores_TE.detach() + self.choice_bias
        replay: Any = self.router_replay
        if replay is None:
            chosen_TX = self._choose(biased_TE)[1]
        else:
            chosen_TX = replay.get_replay_topk(biased_TE, self.topk, None, None, self._choose)[1]
        probabilities_TX = scores_TE.gather(1, chosen_TX)
        if self._experts.normalised:
            probabilities_TX = probabilities_TX / (probabilities_TX.sum(1, keepdim=True) + 1e-20)
        probabilities_TX = probabilities_TX * self._experts.scale
        empty_TE = torch.zeros_like(scores_TE)
        chosen_TE = empty_TE.bool().scatter(1, chosen_TX, True)
        return empty_TE.scatter(1, chosen_TX, probabilities_TX), chosen_TE

    def _choose(self, biased_TE: Tensor, *_: Any, **unused: Any) -> tuple[Tensor, Tensor]:
        """The best experts of the groups whose two best experts have the largest sums."""
        groups = self._experts.num_groups
        if groups > 1:
            by_group = biased_TE.unflatten(1, (groups, -1))
            sums = by_group.topk(2, dim=2).values.sum(dim=2)
            best = sums.topk(self._experts.groups_per_token, dim=1).indices
            is_best = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
            biased_TE = by_group.masked_fill(~is_best.unsqueeze(2), float("-inf")).flatten(1)
        return torch.topk(biased_TE, self.topk, dim=1)
