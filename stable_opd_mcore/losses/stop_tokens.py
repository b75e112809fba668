"""Stop tokens of a student and a teacher that end differently (docs/method.md §4).

The stop ids of both models are one outcome, for both models. Where only sampled tokens are
compared, a sampled stop id counts with the probability of that outcome (`target_logprobs`). Where
whole distributions are compared, the ids are merged in every model's logits (`merge_stops_`): the
first id takes the logsumexp of all, the others take NEVER. Shapes and ids stay as they are. The
gradient of that outcome is then spread over its ids by the student's softmax among them.

N rows of a micro-batch, C rows of a block, V columns of this rank's shard, J looked-up columns of a
row, K columns of a support, M models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.output_head import Head, ModelTensors, accumulation_dtype
from stable_opd_mcore.losses.torch_ops import DenseTerm, Normaliser, ShardSums, SparseColumns
from stable_opd_mcore.losses.vocabulary_sums import Statistics, add_sums, operations

# A logit far below any other, and finite: a probability of 0 times it must be 0 in every sum.
NEVER = -1e9


def shared_stop_ids(
    student_stop_ids: Sequence[int], teacher_stop_ids: Sequence[int]
) -> tuple[int, ...]:
    """The stop ids of both models, which are one outcome in every distribution that is compared.

    Empty where both stop on one and the same token: then nothing changes.

    Raises:
        UserError: one of the models has no stop ids.
    """
    student, teacher = set(student_stop_ids), set(teacher_stop_ids)
    if not student or not teacher:
        raise UserError(
            f"a stop class needs stop ids of both models; student has {sorted(student)}, teacher "
            f"has {sorted(teacher)}: set student.stop_token_ids and teacher.stop_token_ids, "
            "or objective.stop_class=false"
        )
    union = tuple(sorted(student | teacher))
    return union if len(union) > 1 else ()


def looked_up_ids(targets_N: Tensor, stop_ids: tuple[int, ...], vocab_size: int) -> Tensor:
    """The ids to look up in every row, [N, J]; UserError for one outside the common vocabulary."""
    _require_stop_ids(stop_ids, vocab_size)
    target_N1 = targets_N[:, None]
    # Filled on the device: a list of numbers would be copied to it.
    return torch.cat([target_N1, *(torch.full_like(target_N1, i) for i in stop_ids)], dim=1)


def target_logprobs(
    logits_CJ: Tensor, normaliser: Normaliser, ids_CJ: Tensor
) -> tuple[Tensor, Tensor]:
    """log p [C] of the target, or of all stop ids together where it is one; and of the target
    itself. Differentiable in the divided logits at `looked_up_ids` and in the normaliser.
    """
    token_C = (logits_CJ[:, 0] - normaliser.maximum_C) - normaliser.log_sum_C
    if ids_CJ.shape[1] == 1:
        return token_C, token_C
    is_stop_C, stop_CJ = (ids_CJ[:, 1:] == ids_CJ[:, :1]).any(1), logits_CJ[:, 1:]
    # Relative to their own maximum: autograd would round the shares of large logits.
    highest_C = stop_CJ.detach().amax(1)
    outcome_C = (stop_CJ - highest_C[:, None]).logsumexp(1)
    stop_C = outcome_C + (highest_C - normaliser.maximum_C) - normaliser.log_sum_C
    return torch.where(is_stop_C, stop_C, token_C), token_C


@dataclass(frozen=True)
class MergedStops:
    """The merged stop ids of one block, an outcome whose logits stay in fp32 (fp64 for fp64).

    In bf16 a logit of 40 is rounded to multiples of 1/4, and the outcome's would shift the
    normaliser of every token. So its column is taken out of the logits (`remove_`), and the outcome
    joins their sums as one more column (`add_to`).
    """

    ids: tuple[int, ...]  # the first stands for the outcome
    logits: ModelTensors  # [C, 1] each, of the outcome, not divided by the temperature
    share_CJ: Tensor  # the student's probabilities of the ids within the outcome
    here: bool  # the outcome's column is in this rank's shard

    def exact(self, ids_CK: Tensor, logits: ModelTensors, scale: float) -> ModelTensors:
        """Divided logits [C, K] of each model at ids, with the outcome's logit in place of its
        rounded column.
        """
        pairs = zip(logits, self.logits, strict=True)
        return ModelTensors._make(
            None if x is None or y is None else torch.where(ids_CK == self.ids[0], y * scale, x)
            for x, y in pairs
        )

    def remove_(self, logits: ModelTensors, head: Head) -> None:
        """Take the outcome out of the logits [C, V] of every model."""
        for x_CV in _present(logits):
            _write_columns_(x_CV, self.ids[:1], [None], head)

    def add_to(self, sums: ShardSums, other_C1: Tensor | None, scale: float) -> ShardSums:
        """Sums of the student, and of one other model, with the outcome added on one rank."""
        if not self.here:
            return sums
        student_C1 = self.logits.student
        return add_sums(sums, operations(student_C1).shard_sums(student_C1, other_C1, scale))

    def token_entropy(self, student: Statistics, temperature: float) -> Tensor:
        """The student's entropy over tokens [C], from its statistics over merged logits."""
        probability_C1 = student.normaliser.log_softmax(self.logits.student / temperature).exp()
        entropy_CJ = cast(Tensor, torch.special.entr(self.share_CJ))  # pyright: ignore[reportUnknownMemberType]
        return student.entropy_C + (probability_C1 * entropy_CJ).sum(1)

    def write_gradient_(
        self,
        gradient_CV: Tensor,
        student: Normaliser,
        logprob_gradient_C: Tensor,
        at_outcome_C1: Tensor,
        at_ids_CJ: Tensor,
        terms: Sequence[DenseTerm],
        scale: float,
        head: Head,
    ) -> None:
        """Overwrite the ids' columns: their shares of d loss / d outcome, plus target's values.

        The outcome's gradient is computed by itself, as a vocabulary of one column and in fp32, so
        that the columns are rounded once like all others.

        Args:
            at_outcome_C1: added to the outcome's gradient, before the temperature's factor.
            at_ids_CJ: added to the ids' columns, after the temperature's factor.
            terms: contain the other model's logits of the outcome, [C, 1].
        """
        outcome_C1 = self.logits.student.clone()
        first_C1 = torch.zeros_like(at_outcome_C1, dtype=torch.int64)
        sparse = SparseColumns(first_C1, at_outcome_C1)
        operations(outcome_C1).write_gradient_(
            outcome_C1, student, logprob_gradient_C, sparse, terms, scale
        )
        of_ids_CJ = self.share_CJ * outcome_C1 + at_ids_CJ
        _write_columns_(gradient_CV, self.ids, of_ids_CJ.unbind(1), head)


def merge_stops_(
    logits: ModelTensors, ids: tuple[int, ...], scale: float, head: Head
) -> MergedStops:
    """Merge `ids` into one outcome in the logits [C, V] of every model, in place. One small
    all-reduce; scale is 1 / temperature.

    Raises:
        UserError: an id outside the common vocabulary.
    """
    _require_stop_ids(ids, head.vocab_size)
    models = _present(logits)
    whole_MCJ = torch.stack([_read_columns(x, ids, head) for x in models])
    head.reduce_(whole_MCJ)
    highest_MC1 = whole_MCJ.amax(2, keepdim=True)
    apart_MCJ = (whole_MCJ - highest_MC1) * scale
    # The maximum is added last, so a single dominant stop id keeps its logit bit for bit.
    merged_MC1 = highest_MC1 + apart_MCJ.logsumexp(2, keepdim=True) / scale
    others = [None] * (len(ids) - 1)
    for x, merged_C in zip(models, merged_MC1.squeeze(2), strict=True):
        _write_columns_(x, ids, [merged_C, *others], head)
    here = 0 <= ids[0] - head.vocab_start < head.num_columns
    outcomes = iter(merged_MC1)
    merged = ModelTensors._make(x if x is None else next(outcomes) for x in logits)
    return MergedStops(ids, merged, apart_MCJ[0].softmax(1), here)


def _present(logits: Iterable[Tensor | None]) -> list[Tensor]:
    return [x for x in logits if x is not None]


def _read_columns(x_CV: Tensor, ids: tuple[int, ...], head: Head) -> Tensor:
    """x[:, id] in fp32 or fp64, [C, J]; 0 for those ids that are in another shard."""
    columns = [token - head.vocab_start for token in ids]
    absent_C = x_CV.new_zeros(len(x_CV))
    parts = [x_CV[:, c] if 0 <= c < head.num_columns else absent_C for c in columns]
    return torch.stack(parts, dim=1).to(accumulation_dtype(x_CV))


def _write_columns_(
    x_CV: Tensor, ids: Sequence[int], values: Sequence[Tensor | None], head: Head
) -> None:
    """x[:, id] = the id's values [C], or NEVER for None, for those ids that are in this shard."""
    for token, values_C in zip(ids, values, strict=True):
        column = token - head.vocab_start
        if not 0 <= column < head.num_columns:
            continue
        if values_C is None:
            x_CV.select(1, column).fill_(NEVER)
        else:
            x_CV.select(1, column).copy_(values_C)


def _require_stop_ids(ids: Sequence[int], vocab_size: int) -> None:
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise UserError(
            f"stop ids {outside} lie outside the common vocabulary of {vocab_size}: set "
            "student.stop_token_ids and teacher.stop_token_ids to ids below it"
        )
