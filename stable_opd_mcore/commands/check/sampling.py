"""Lengths, sampling, learning rate: windows, rotary base, top-p, vocabulary sizes of a config.

The schema refuses a temperature that a served teacher cannot score at; this list shows its message.
"""

from collections.abc import Iterator

from stable_opd_mcore.commands.check.finding import Finding, finding
from stable_opd_mcore.inputs.loading import refuse_long_support, refuse_small_vocabulary
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.placement.topology import sends_adapter
from stable_opd_mcore.serving.requests import UNUSED_POSITIONS

# Families with rope_theta 10,000 were trained to this many positions: Llama 2, Qwen2.5-Math.
_USUAL_THETA, _USUAL_WINDOW = 10_000.0, 4096
_LEAST_FACTOR_LR = 3e-5


def student_window(inputs: RunInputs) -> Iterator[Finding]:
    """Responses that leave no room for a prompt in the student's window."""
    window, response = inputs.architecture.max_positions, inputs.config.longest_turn
    if inputs.objective.needs_rollouts and response >= window:
        described = _window(inputs.architecture)
        yield finding("student-window", described=described, response=response, window=window)


def teacher_window(inputs: RunInputs) -> Iterator[Finding]:
    """Sequences that are longer than the teacher's window, in the trainer or on servers."""
    teacher = inputs.pair.teacher
    window = teacher and teacher.settings.get("max_position_embeddings")
    if teacher is None or type(window) is not int:
        return
    longest = inputs.config.longest_context + len(inputs.pair.student.prompt_ids)
    if inputs.config.max_turns > 1:  # an episode ends where the student's window does
        longest = min(longest, inputs.architecture.max_positions)
    named = [model for role, (_, model) in inputs.models.items() if "." in role]
    window = min([window, *(model.max_positions for model in named)])
    settings = inputs.config.teacher
    if settings is not None and settings.is_served:
        window -= UNUSED_POSITIONS
    if longest > window:
        yield finding("teacher-window", window=window, longest=longest)


def rotary_base(inputs: RunInputs) -> Iterator[Finding]:
    """A student whose window was raised without its rotary base."""
    student = inputs.architecture
    needed = inputs.config.longest_turn
    raised = student.max_positions > _USUAL_WINDOW and needed > _USUAL_WINDOW
    if raised and student.rotary.theta <= _USUAL_THETA and student.rotary.scaling is None:
        yield finding(
            "rotary-base",
            theta=student.rotary.theta,
            usual=_USUAL_WINDOW,
            described=_window(student),
            needed=needed,
        )


def nucleus(inputs: RunInputs) -> Iterator[Finding]:
    """Rollouts from a part of the distribution that the loss compares."""
    top_p = inputs.config.sampling.top_p
    is_usual = inputs.objective.name == "lsm"  # its paper samples at 0.9
    if inputs.objective.needs_rollouts and top_p < 1 and not is_usual:
        yield finding("nucleus", top_p=top_p)


def mixed_groups(inputs: RunInputs) -> Iterator[Finding]:
    """Responses of one prompt from several weights, whose rewards are compared."""
    settings = inputs.config.rollout
    if inputs.objective.needs_rewards and settings.partial:
        yield finding("mixed-groups", name=inputs.objective.name, count=settings.samples_per_prompt)


def slow_factors(inputs: RunInputs) -> Iterator[Finding]:
    """A learning rate of full training with low-rank factors."""
    lr = inputs.config.optimizer.lr
    if inputs.config.student.lora and lr < _LEAST_FACTOR_LR:
        yield finding("slow-factors", lr=lr, usual=_LEAST_FACTOR_LR)


def rounded_factors(inputs: RunInputs) -> Iterator[Finding]:
    """Low-rank factors that servers receive merged into bf16."""
    config, lora = inputs.config, inputs.config.student.lora
    corrects = config.rollout.importance_correction != "none"
    if not lora or not config.rollout.has_servers or sends_adapter(config, inputs.architecture):
        return
    if config.train.precision == "bf16" and not corrects:
        yield finding("rounded-factors", rank=lora.rank)


def embedding_rows(inputs: RunInputs) -> None:
    """Embeddings with fewer rows than the tokenizer has tokens; `train` refuses them."""
    for settings, model in inputs.models.values():
        refuse_small_vocabulary(settings.path, model, inputs.tokenizer.vocab_size)


def support(inputs: RunInputs) -> None:
    """An objective.top_k above the number of tokens; `train` refuses it."""
    refuse_long_support(inputs.objective, inputs.tokenizer.vocab_size)


def _window(model: Architecture) -> str:
    scaling = "" if model.rotary.scaling is None else f", rope scaling {model.rotary.scaling.kind}"
    return f"{model.max_positions} (rope_theta {model.rotary.theta:g}{scaling})"
