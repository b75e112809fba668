"""Functions for `teacher.prompt.function`, whose teacher reads what happened in a rollout (see
docs/teacher_prompt.md).

    teacher:
      prompt: {function: "docs/examples/teacher_prompts.py:feedback"}

Each gets the row as a dict, the rollout, and the other rollouts of its prompt. A rollout has
`messages`, of which the first `num_prompt_messages` are the prompt, `text`, `reward`, `feedback`,
`metrics` and `ending`.
"""

from typing import Any

Message = dict[str, str]


def feedback(row: dict[str, Any], rollout: Any, others: list[Any]) -> list[Message] | None:
    """What the environment or the reward function said of this attempt; None if it said nothing."""
    if rollout.feedback is None:
        return None
    return with_note(rollout, f"A first attempt got this feedback:\n{rollout.feedback}")


def successful_sibling(
    row: dict[str, Any], rollout: Any, others: list[Any]
) -> list[Message] | None:
    """The shortest other attempt that is right; None without one."""
    right = [other.text for other in others if other.reward == 1]
    return with_note(rollout, f"A correct solution is:\n{min(right, key=len)}") if right else None


def golden_solution(row: dict[str, Any], rollout: Any, others: list[Any]) -> list[Message] | None:
    """Show the teacher the row's solution if the attempt is wrong; return None if it is right."""
    if rollout.reward == 1:
        return None
    return with_note(rollout, f"A correct solution is:\n{row['solution']}")


def sibling_or_feedback(
    row: dict[str, Any], rollout: Any, others: list[Any]
) -> list[Message] | None:
    """A successful sibling, or without one the feedback (SDPO, arXiv 2601.20802)."""
    return successful_sibling(row, rollout, others) or feedback(row, rollout, others)


def with_note(rollout: Any, note: str) -> list[Message]:
    """The prompt, and the note at the end of its last message."""
    messages = rollout.messages[: rollout.num_prompt_messages]
    texts = [message["content"] for message in messages]
    texts[-1] += f"\n\n{note}\n\nNow solve it in your own words."
    return [
        {"role": message["role"], "content": text}
        for message, text in zip(messages, texts, strict=True)
    ]
