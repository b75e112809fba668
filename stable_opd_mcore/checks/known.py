"""What is known of a run before its models are loaded; each part is read once, when asked for.

`train` reads the same parts by the same functions (run_inputs.py), so a part that cannot be read
raises here the UserError that ends `train`. Not here: what does not go together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stable_opd_mcore.checks.pair import Pair, configured_pair
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptSet
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.objectives import Objective, build_objective
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.planning.hardware import DEVICES
from stable_opd_mcore.planning.plan import Cluster, Plan, make_plan
from stable_opd_mcore.run_inputs import (
    configured_architecture,
    load_held_out,
    load_prompts,
    load_teacher_tokenizer,
    load_tokenizer,
    teacher_stop_ids,
)


@dataclass(frozen=True)
class Place:
    """The GPUs of a job."""

    cluster: Cluster
    gpu: str  # its name; "cpu": there is none, and nothing has to fit

    @property
    def on_gpu(self) -> bool:
        return self.gpu != "cpu"


class Known:
    """A run's config and, when asked for, what its files say.

    Args:
        place: None: not known, so memory and servers are not checked.
        accept_changes: whether the run is resumed with other settings on purpose.
    """

    def __init__(self, config: Config, place: Place | None, accept_changes: bool = False):
        self.config, self.place, self.accept_changes = config, place, accept_changes
        self._parts: dict[str, Any] = {}

    def _once(self, name: str, read: Callable[[], Any]) -> Any:
        """The part, or the same error again."""
        if name not in self._parts:
            try:
                self._parts[name] = read()
            except UserError as error:
                self._parts[name] = error
        if isinstance(self._parts[name], UserError):
            raise self._parts[name]
        return self._parts[name]

    @property
    def tokenizer(self) -> Tokenizer:
        """The student's."""
        return self._once("tokenizer", lambda: load_tokenizer(self.config))

    @property
    def teacher_tokenizer(self) -> Tokenizer | None:
        return self._once("teacher tokenizer", lambda: load_teacher_tokenizer(self.config))

    @property
    def teacher_stops(self) -> tuple[int, ...] | None:
        """None without a teacher."""
        if self.teacher_tokenizer is not None:
            return self.teacher_tokenizer.stop_token_ids
        return self._once("stops", lambda: teacher_stop_ids(self.config, self.tokenizer))

    @property
    def objective(self) -> Objective:
        return self._once(
            "objective",
            lambda: build_objective(self.config, self.tokenizer.stop_token_ids, self.teacher_stops),
        )

    @property
    def architecture(self) -> Architecture:
        """The student's."""
        return self._once("student", lambda: configured_architecture(self.config.student))

    @property
    def teacher_architecture(self) -> Architecture | None:
        """None without a teacher, or where only its address is known."""
        teacher = self.config.teacher
        if teacher is None or (teacher.path is None and teacher.architecture is None):
            return None
        if teacher.engine == "sglang":  # SGLang builds it, whatever its family
            return None
        return self._once("teacher", lambda: configured_architecture(teacher))

    @property
    def pair(self) -> Pair:
        return self._once(
            "pair",
            lambda: configured_pair(
                self.config,
                self.tokenizer,
                self.teacher_tokenizer,
                self.teacher_stops,
                self.objective,
            ),
        )

    @property
    def plan(self) -> Plan | None:
        """Memory by `stable-opd plan`; None where the GPU or its memory is not known."""
        place = self.place
        if place is None or place.gpu not in DEVICES:
            return None
        return self._once("plan", lambda: make_plan(self.config, place.cluster, place.gpu))

    @property
    def prompts(self) -> PromptSet:
        """The training prompts, with golden solutions where the objective trains on them."""
        return self._once(
            "prompts",
            lambda: load_prompts(self.config, self.tokenizer, self.architecture, self.objective),
        )

    @property
    def held_out(self) -> PromptSet | None:
        return self._once(
            "held out",
            lambda: load_held_out(self.config, self.tokenizer, self.architecture),
        )
