"""What does not go together with `student.lora`. Loads without torch."""

from typing import Any


def lora_refusal(config: Any) -> str | None:
    """Why the run cannot train low-rank factors, and what to set; None if it can.

    Args:
        config: schema.Config, which calls this.
    """
    lora, reference, teacher = config.student.lora, config.reference, config.teacher
    if lora is None:
        return None
    for key, update, rest in (
        ("reference.update", reference.update, "every"),
        ("teacher.weights", teacher and teacher.weights, "frozen"),
    ):
        if update == "ema":
            return (
                f"{key}=ema with student.lora: the average of low-rank factors is not that of the "
                f"models; set {key}={rest}, or student.lora=null"
            )
    if reference.update == "every" and config.weights_of["reference"] != "base":
        return (
            f"reference.update=every with student.lora, reference.path={reference.path} and "
            f"fp8.reference={config.fp8.reference}: the reference takes the student's factors, so "
            "it must have the student's weights and FP8; set reference.path=null and "
            f"fp8.reference={config.fp8.student or 'null'}, or reference.update=never"
        )
    is_copy = {
        "reference": bool(config.largest_beta) and reference.path is None,
        "teacher": teacher is not None and teacher.is_self and teacher.weights == "frozen",
    }
    for role, copies in is_copy.items():
        if lora.path is not None and copies and config.weights_of[role] != "base":
            return (
                f"fp8.{role}={getattr(config.fp8, role)} with student.lora.path and "
                f"fp8.student={config.fp8.student}: the {role} would be a copy of the student's "
                f"weights without the adapter; set fp8.{role}={config.fp8.student or 'null'}"
            )
    return None
