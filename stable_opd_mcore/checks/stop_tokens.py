"""Stop tokens: the class that the loss compares, and sources that contradict each other.

`stop_class` is what the loss does (docs/method.md §4); `train` prints it.
"""

from __future__ import annotations

from stable_opd_mcore.checks.finding import Finding
from stable_opd_mcore.checks.pair import ModelFiles, Pair

SUBJECT = "stop tokens"
_TEMPLATE = "chat template"  # its name among ModelFiles.stop_sources


def stop_class(pair: Pair) -> list[str]:
    """What each model stops on and which file says so, and what the loss compares, as lines."""
    lines = [
        f"{model.role} stops on "
        + ", ".join(f"{model.named(token)}{_said_by(model, token)}" for token in model.stop_ids)
        for model in pair.models
    ]
    if pair.merged_stops:
        ids = " + ".join(map(str, pair.merged_stops))
        lines.append(f"stop class: the loss compares p({ids}), one outcome for both models")
    elif pair.teacher is not None:
        lines.append("stop class: none; the loss compares the probability of single tokens")
    return lines


def different_stops(pair: Pair) -> list[Finding]:
    """A student and a teacher that end responses with different tokens."""
    student, teacher = pair.student, pair.teacher
    if teacher is None or set(student.stop_ids) == set(teacher.stop_ids):
        return []
    merged = " + ".join(map(str, pair.merged_stops))
    return [
        Finding(
            "note" if merged else "warning",
            SUBJECT,
            "student and teacher end responses with different tokens",
            (
                ("student", student.named_all(student.stop_ids)),
                ("teacher", teacher.named_all(teacher.stop_ids)),
            ),
            f"the loss compares p({merged}) as one outcome in both models{_renamed(pair)}"
            if merged
            else "the teacher gives the student's stop token almost no probability, and training "
            "removes it: responses grow up to the limit",
            "student.stop_token_ids and teacher.stop_token_ids, where the files are wrong"
            if merged
            else "objective.stop_class=true",
        )
    ]


def _said_by(model: ModelFiles, token_id: int) -> str:
    names = [name for name, ids in model.stop_sources.items() if token_id in ids]
    return f" ({', '.join(names)})" if names else ""


def _renamed(pair: Pair) -> str:
    """What the merged ids that are no stop tokens of the teacher mean to it."""
    teacher, own = pair.teacher, pair.student.tokenizer.names_by_id
    assert teacher is not None
    names = teacher.tokenizer.names_by_id
    others = [
        f"{token_id} is {names.get(token_id)!r} there"
        for token_id in pair.merged_stops
        if token_id not in teacher.stop_ids and names.get(token_id) != own.get(token_id)
    ]
    return f"; the teacher does not stop on them all: {', '.join(others)}" if others else ""


def end_of_turn_is_no_eos(pair: Pair) -> list[Finding]:
    """A chat template that ends turns with another token than the model's files name as EOS.

    Both are stop ids, so the contradiction is harmless where the other model has the same one.
    """
    if pair.teacher is None or _ends(pair.student) == _ends(pair.teacher):
        return []
    found = []
    for model in pair.models:
        turn_end, eos = _ends(model)
        files = [name for name, ids in model.stop_sources.items() if ids and name != _TEMPLATE]
        if not turn_end or not eos or turn_end[0] in eos:
            continue
        finding = Finding(
            "warning",
            SUBJECT,
            f"the {model.role}'s chat template ends turns with another token than its EOS",
            (
                ("chat template", model.named_all(turn_end)),
                (", ".join(files), model.named_all(eos)),
            ),
            "golden solutions end with the first; a base model was trained to stop on the second"
            if model is pair.student
            else "the teacher's probability of stopping is divided between both",
            f"{model.role}.stop_token_ids, the token that ends golden solutions first",
        )
        found.append(finding)
    return found


def _ends(model: ModelFiles) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The token that ends a turn of the template, and those that the files name as EOS."""
    eos = [token for name, ids in model.stop_sources.items() if name != _TEMPLATE for token in ids]
    return model.stop_sources.get(_TEMPLATE, ()), tuple(dict.fromkeys(eos))
