"""Conversations of several turns: what stands between two turns, and a whole example.

The teacher reads the student's tokens, those between two turns included. Not here: the prompt
before the first turn (templates.py).
"""

from collections.abc import Iterator

import numpy as np

from stable_opd_mcore.checks.finding import Finding, finding
from stable_opd_mcore.checks.lazy_inputs import RunInputs
from stable_opd_mcore.checks.pair import ModelFiles
from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.records import Sample

_SHOWN_CHARACTERS = 400  # of one piece


def different_bridges(inputs: RunInputs) -> Iterator[Finding]:
    """A teacher that scores several turns, and whose template writes another text between them."""
    teacher = inputs.pair.teacher
    if teacher is None or not teacher.tokenizer.has_template:
        return
    bridge, of_teacher = Bridge(inputs.pair.student.tokenizer), Bridge(teacher.tokenizer)
    for role in sorted(_scored_roles(inputs)):
        own = repr(bridge.between(role))
        other = of_teacher.refusal(role) or repr(of_teacher.between(role))
        if own != other:
            yield finding("different-bridges", role=role, student=own, teacher=other)


def _scored_roles(inputs: RunInputs) -> frozenset[str]:
    """The roles of the messages between turns that the teacher scores."""
    scores_golden = inputs.config.objective.on_policy_fraction < 1
    return inputs.prompts.roles_between if scores_golden else frozenset()


def shown_transcript(model: ModelFiles, sample: Sample) -> str:
    """A sample as this model reads it: its prompt, and each piece, sampled or observed, after it.

    A prompt of the teacher's own is shown for the teacher.
    """
    is_sampled = np.zeros(len(sample.token_ids), np.bool_)
    is_sampled[sample.places] = True
    start, prompt = sample.num_prompt_tokens, sample.teacher_prompt_token_ids
    if prompt is None or model.role == "student":
        prompt = sample.token_ids[:start]
    parts = [("prompt", prompt)]
    borders = start + 1 + np.flatnonzero(np.diff(is_sampled[start:]))
    for begin, end in zip([start, *borders], [*borders, len(is_sampled)], strict=True):
        parts.append(("sampled" if is_sampled[begin] else "observed", sample.token_ids[begin:end]))
    return "\n".join(_piece(model, name, ids.tolist()) for name, ids in parts)


def _piece(model: ModelFiles, name: str, token_ids: list[int]) -> str:
    text, half = "".join(model.tokenizer.pieces(token_ids)), _SHOWN_CHARACTERS // 2
    if len(text) > 2 * half:
        text = f"{text[:half]} ... {text[-half:]}"
    return f"[{name}: {len(token_ids)} tokens]\n{text}"
