"""Keep the teacher's order: a hinge on every pair of its most probable tokens."""

from torch import Tensor

from stable_opd_mcore.config.schema import ObjectiveConfig
from stable_opd_mcore.losses.token_losses import Rows

NEEDS = ("support",)  # of the objective.top_k ids that the teacher finds most probable
MARGIN = 0.3  # nats


def pairwise_margin(rows: Rows, settings: ObjectiveConfig) -> Tensor:
    """Mean of max(0, MARGIN - log pi_i + log pi_j) over the pairs with log pi_T,i > log pi_T,j.

    C rows, K ids of the support; returns [C], nats.
    """
    assert rows.support is not None
    assert rows.teacher_support is not None
    lead_CKK = rows.support[:, :, None] - rows.support[:, None, :]
    is_pair_CKK = rows.teacher_support[:, :, None] > rows.teacher_support[:, None, :]
    hinge_CKK = (MARGIN - lead_CKK).clamp(min=0).masked_fill(~is_pair_CKK, 0)
    return hinge_CKK.sum((1, 2)) / is_pair_CKK.sum((1, 2)).clamp(min=1)
