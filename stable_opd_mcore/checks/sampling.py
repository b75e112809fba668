"""Lengths and sampling: windows, rotary base, top-p, vocabulary sizes of the models of a config.

The temperature against a served teacher is refused by the schema, which this list shows as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from stable_opd_mcore.checks.finding import Finding
from stable_opd_mcore.checks.known import Known
from stable_opd_mcore.models.families import Architecture
from stable_opd_mcore.run_inputs import refuse_small_vocabulary

# Families with rope_theta 10,000 were trained to this many positions: Llama 2, Qwen2.5-Math.
_USUAL_THETA, _USUAL_WINDOW = 10_000.0, 4096


def student_window(known: Known) -> Iterator[Finding]:
    """Responses that leave no prompt in the student's window."""
    window, response = known.architecture.max_positions, known.config.sampling.max_new_tokens
    if known.objective.needs_rollouts and response >= window:
        yield Finding(
            "error",
            "window",
            "responses leave no prompt in the student's window",
            (
                ("max_position_embeddings", _window(known.architecture)),
                ("sampling.max_new_tokens", str(response)),
            ),
            "no row can be used",
            f"sampling.max_new_tokens below {window}, or a larger student.window with the "
            "student.rope_theta it needs (Stable-OPD: 16384 and 40000 for Qwen2.5-Math)",
        )


def teacher_window(known: Known) -> Iterator[Finding]:
    """Sequences that are longer than the teacher's window, in the trainer or on servers."""
    teacher = known.pair.teacher
    window = teacher and teacher.settings.get("max_position_embeddings")
    if teacher is None or type(window) is not int:
        return
    longest = known.config.sampling.max_new_tokens + len(known.pair.student.prompt_ids)
    if longest > window:
        yield Finding(
            "error",
            "window",
            "prompt and response exceed the teacher's window",
            (
                ("max_position_embeddings", str(window)),
                ("a short prompt + sampling.max_new_tokens", str(longest)),
            ),
            "the teacher scores tokens at positions that it was not trained on, with "
            "probabilities that mean nothing; a server refuses them",
            f"sampling.max_new_tokens below {window}, or a teacher with a longer window",
        )


def rotary_base(known: Known) -> Iterator[Finding]:
    """A student whose window was raised without its rotary base."""
    student = known.architecture
    needed = known.config.sampling.max_new_tokens
    raised = student.max_positions > _USUAL_WINDOW and needed > _USUAL_WINDOW
    if raised and student.rope_theta <= _USUAL_THETA and student.rope_scaling is None:
        yield Finding(
            "warning",
            "window",
            f"rope_theta={student.rope_theta:g} is usual for {_USUAL_WINDOW} positions",
            (
                ("max_position_embeddings", _window(student)),
                ("sampling.max_new_tokens", str(needed)),
            ),
            f"beyond {_USUAL_WINDOW} tokens the student degrades, unless it was trained so (as "
            "R1-Distill was): long responses end in repetition",
            "student.rope_theta (Stable-OPD: 40000 for 16384 positions)",
        )


def nucleus(known: Known) -> Iterator[Finding]:
    """Rollouts from a part of the distribution that the loss compares."""
    sampling = known.config.sampling
    if known.objective.needs_rollouts and sampling.top_p < 1:
        usual = known.config.objective.name == "lsm"  # its paper samples at 0.9
        yield Finding(
            "note" if usual else "warning",
            "sampling",
            "rollouts are sampled from a part of the distribution that the loss compares",
            (("sampling.top_p", f"{sampling.top_p:g}"), ("the loss", "the full softmax, top_p 1")),
            "tokens outside the nucleus are never sampled, and the student's and the teacher's "
            "probabilities of them still count: the gradient is not that of the KL",
            "sampling.top_p=1",
        )


def embedding_rows(known: Known) -> Iterator[Finding]:
    """Embeddings with fewer rows than the tokenizer has tokens; `train` refuses them."""
    refuse_small_vocabulary(known.config.student, known.architecture, known.tokenizer.vocab_size)
    if known.config.teacher is not None and known.teacher_architecture is not None:
        refuse_small_vocabulary(
            known.config.teacher, known.teacher_architecture, known.tokenizer.vocab_size
        )
    yield from ()


def _window(model: Architecture) -> str:
    scaling = "" if model.rope_scaling is None else f", rope scaling {model.rope_scaling.kind}"
    return f"{model.max_positions} (rope_theta {model.rope_theta:g}{scaling})"
