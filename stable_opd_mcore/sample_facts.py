"""What every rank knows of the samples of a step: facts and weights, but no tokens.

B samples of a step, of a minibatch, or of this rank; other suffixes of names: records.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SampleFacts:
    """What every rank knows of B samples: numbers, but no tokens."""

    holder_B: NDArray[np.int64]  # the data-parallel rank that sampled it
    index_B: NDArray[np.int64]  # its place in the holder's list
    slot_B: NDArray[np.int64]  # its prompt's
    episode_B: NDArray[np.int64]  # its rollout or golden solution, numbered over all ranks
    golden_B: NDArray[np.bool_]  # else a rollout
    off_policy_B: NDArray[np.bool_]  # see Sample
    tokens_B: NDArray[np.int64]  # of its sequence
    sampled_tokens_B: NDArray[np.int64]  # N, see Sample
    trained_tokens_B: NDArray[np.int64]
    reward_B: NDArray[np.float64]  # NaN: not graded
    turns_B: NDArray[np.int64]  # at least 1
    truncated_turns_B: NDArray[np.int64]  # those that ended as "length"
    source_B: NDArray[np.int64] | None = None  # its place in data.train; None: there is one source
    # of the teacher's sequence; 0, or None for all: the teacher reads the student's, or nothing
    teacher_tokens_B: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.holder_B)

    @staticmethod
    def join(parts: Sequence[SampleFacts]) -> SampleFacts:
        """The facts of all parts, one after the other; the parts have the same fields."""
        columns = [part._given() for part in parts]
        return SampleFacts(
            **{name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
        )

    @property
    def scored_B(self) -> NDArray[np.bool_]:
        """See `Sample.is_scored`."""
        return ~self.golden_B | self.off_policy_B

    def select(self, index_B: NDArray[Any] | slice) -> SampleFacts:
        """The facts of some samples; `index_B` is their places, a slice, or a mask."""
        return SampleFacts(**{name: values[index_B] for name, values in self._given().items()})

    def _given(self) -> dict[str, NDArray[Any]]:
        return {name: values for name, values in vars(self).items() if values is not None}


@dataclass(frozen=True)
class SampleWeights:
    """Weights of B samples in each loss component, normalisers included.

    `pg_B` and `sft_B` are the weight of each trained token of the sample, `kl_B` and `advantage_B`
    of each sampled token.
    """

    pg_B: NDArray[np.float64]  # 0 on golden solutions, except off-policy ones
    kl_B: NDArray[np.float64]  # 0 on golden solutions
    sft_B: NDArray[np.float64]  # 0 on rollouts
    advantage_B: NDArray[np.float64] | None = None  # given by grpo; None: computed from scores

    def select(self, index_B: NDArray[Any]) -> SampleWeights:
        """The weights of the samples at `index_B`."""
        given = {name: values[index_B] for name, values in vars(self).items() if values is not None}
        return SampleWeights(**given)
