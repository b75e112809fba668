"""A reward for a required format: one closed thought, then one boxed answer."""

import re

BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def reward(row: dict, response: str) -> float:
    """0.5 for the format, 1 if the boxed answer is also the row's, else 0."""
    _, closed, answer = response.partition("</think>")
    boxes = BOX.findall(answer)
    if not closed or "</think>" in answer or len(boxes) != 1:
        return 0.0
    return 1.0 if boxes[0].strip() == str(row["answer"]).strip() else 0.5
