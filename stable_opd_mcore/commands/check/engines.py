"""What sampling, a served teacher and metrics need: keys of servers, a draft, a stored run,
packages, an allocator whose memory servers can read.

`train` refuses the same, in the same words; most of it only once its models are loaded. Not here:
whether servers answer, which is known when the run starts.
"""

from stable_opd_mcore.inputs.loading import refuse_missing_trackers
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.placement.draft import refuse_unfit_draft
from stable_opd_mcore.rollout.replay import replay_engine
from stable_opd_mcore.rollout.sglang.server_setup import refuse_expandable_segments
from stable_opd_mcore.serving.api_key import read_api_key


def student_servers_key(inputs: RunInputs) -> None:
    """An API key of the rollouts' servers that is absent or readable by others."""
    if inputs.config.rollout.engine == "sglang":
        read_api_key(inputs.config.rollout.sglang.api_key_file)


def teacher_servers_key(inputs: RunInputs) -> None:
    """The same of the teacher's."""
    teacher = inputs.config.teacher
    if teacher is not None and teacher.is_served:
        read_api_key(teacher.api_key_file)


def allocator(inputs: RunInputs) -> None:
    """An allocator of the shell's that colocated servers cannot share memory with."""
    if inputs.place is not None and inputs.place.on_gpu:
        refuse_expandable_segments(inputs.config)


def draft(inputs: RunInputs) -> None:
    """A draft of speculative decoding that is not there, of another student, or on a CPU."""
    on_gpu = inputs.place is None or inputs.place.on_gpu
    refuse_unfit_draft(inputs.config, inputs.architecture, on_gpu=on_gpu)


def stored_rollouts(inputs: RunInputs) -> None:
    """Rollouts to replay that are not stored, or were sampled with other settings."""
    if inputs.config.rollout.engine == "replay":
        replay_engine(inputs.config)


def trackers(inputs: RunInputs) -> None:
    """A tracker of metrics that is not installed."""
    refuse_missing_trackers(inputs.config)
