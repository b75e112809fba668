"""A warning where a frozen draft costs more than it saves: the student has moved away from it."""

import logging
from collections.abc import Mapping

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.monitoring.metric_sinks import MetricSinks
from stable_opd_mcore.placement.draft import least_tokens
from stable_opd_mcore.placement.model_size import WEIGHT_BYTES

DRAFT_EVENT = "draft"
_KEY = "engine/accepted_tokens_per_step"
_log = logging.getLogger(__name__)


class DraftWatch:
    """Looks at every step's accepted tokens, and warns each time that they fall below the point
    where the draft costs; nothing without a draft."""

    def __init__(self, config: Config, student: Architecture) -> None:
        self._least = least_tokens(config, student, WEIGHT_BYTES[config.train.precision])
        self._costs = False

    def look(self, step: int, values: Mapping[str, float | None], sinks: MetricSinks) -> None:
        """Judge the step's metrics; a warning is an event in the file, and a line of the log."""
        accepted = values.get(_KEY)
        if self._least is None or accepted is None:
            return
        did_cost, self._costs = self._costs, accepted < self._least
        if not self._costs or did_cost:
            return
        details = {"accepted_tokens_per_step": accepted, "costs_below": self._least}
        sinks.write_event(DRAFT_EVENT, step, {"action": "warned", **details})
        _log.warning(
            "step %d: a pass of the student takes %.2f tokens with the draft's, and below %.2f the "
            "draft costs more than it saves: set rollout.sglang.speculative=null, fewer steps, or "
            "a draft that was adapted to the student as it is now",
            *(step, accepted, self._least),
        )
