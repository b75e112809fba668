"""What of a response is thought, and what is answer."""

_THINK, _THINK_END = "<think>", "</think>"


def opens_thinking(prompt_text: str) -> bool:
    """Whether a prompt ends with <think>, which the response must then close."""
    return prompt_text.rstrip().endswith(_THINK)


def golden_response(solution: str, prompt_text: str) -> str:
    """A golden solution as the response to a prompt, which may have opened <think> already.

    Without </think> it then begins with it, or the model would learn to leave the thought open.
    """
    if not opens_thinking(prompt_text):
        return solution
    if _THINK_END not in solution:
        return f"\n{_THINK_END}\n\n{solution}"
    opening = solution.lstrip()
    return opening.removeprefix(_THINK).lstrip("\n") if opening.startswith(_THINK) else solution
