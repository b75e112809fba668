"""The parts of a run on one rank, which every function of the training loop receives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptOrder, PromptSet
from stable_opd_mcore.data.rollout_prompts import RolloutPrompts
from stable_opd_mcore.data.source_order import SourceOrder
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.source_objectives import SourceObjectives
from stable_opd_mcore.parallel.device_memory import DeviceMemory
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.scoring.scorer import Scorer
from stable_opd_mcore.serving.idle_clock import IdleClock
from stable_opd_mcore.serving.teacher import ServedTeacher
from stable_opd_mcore.train.reference import Moving
from stable_opd_mcore.train.samples.overlap import OverlapPair
from stable_opd_mcore.train.student import Student


@dataclass(frozen=True)
class Run:
    """A step changes weights and optimizer of the student, weights that follow it (`moving`),
    what the engine holds, and what is on the device (`memory`).
    """

    config: Config
    world: World
    tokenizer: Tokenizer
    student: Student
    head: Head | None  # the student's output head; None off the last pipeline stage
    teacher: Scorer | None
    served_teacher: ServedTeacher | None  # whose scores `teacher` reads; None: it is in the trainer
    reference: Scorer | None
    moving: Mapping[str, Moving]  # "reference", "teacher": those that follow the student
    behaviour: Scorer | None  # scores with the student's weights from before the step's updates
    rollout_prompts: RolloutPrompts | None  # teacher.prompt.function
    overlap: OverlapPair | None  # student and teacher, scored for the overlap/* and stop/* metrics
    memory: DeviceMemory  # which of all these are on the device
    engine: RolloutEngine
    held_out_engine: RolloutEngine | None  # samples evaluations where `engine` replays a run
    sampling: Sampling
    objective: SourceObjectives
    prompts: PromptSet
    held_out: PromptSet | None
    order: PromptOrder | SourceOrder
    grader: Grader
    phase: Callable[[str], object] = lambda _: None  # called as a phase begins, with its name

    @property
    def idle_clocks(self) -> dict[str, IdleClock]:
        """The clocks of rollout servers and of a served teacher, by their metric."""
        clocks = {
            "perf/servers_waited": self.engine.idle,
            "perf/teacher_waited": self.served_teacher and self.served_teacher.idle,
        }
        return {metric: clock for metric, clock in clocks.items() if clock is not None}
