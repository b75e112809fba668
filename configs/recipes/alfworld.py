"""ALFWorld's games in text (the package alfworld), a new context in each step, as in LSM's runs.

The row's column `game` is a file game.tw-pddl that `alfworld-download` has written. The student
reads the task, its last two steps, what it sees now and the actions that it may take. It was run
with alfworld 0.4.2 on games written for that engine; its test has objects with the same interface.
"""

import re
from collections.abc import Generator, Sequence
from typing import Any

HISTORY = 2  # steps that the student reads again
ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


def episode(row: dict[str, Any], seed: int) -> Generator[dict[str, str], str, float]:  # noqa: ARG001
    import textworld  # here, so that a config is planned and checked without it
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    wanted = textworld.EnvInfos(won=True, admissible_commands=True)
    wrappers = [AlfredDemangler(shuffle=False)]
    env = textworld.start(row["game"], request_infos=wanted, wrappers=wrappers)
    try:
        state = env.reset()
        task = state.feedback.partition("Your task is to:")[2].strip()
        seen, steps = state.feedback.strip(), list[tuple[str, str]]()
        while True:
            said = yield {"restart": prompt(task, steps, seen, state.admissible_commands)}
            found = ACTION.findall(said)
            action = found[-1].strip().lower() if found else "look"
            state, _, _ = env.step(action)
            steps.append((seen, action))
            if state.won:
                return 1.0
            seen = state.feedback.strip()
    finally:
        env.close()


def prompt(task: str, steps: Sequence[tuple[str, str]], seen: str, actions: Sequence[str]) -> str:
    history = "".join(
        f"\nIn step {number} you saw: {text}\nYour action: {action}\n"
        for number, (text, action) in [*enumerate(steps, 1)][-HISTORY:]
    )
    allowed = "\n".join(f"- {action}" for action in actions if action != "help")
    return (
        f"You act in a household, in text. Your task is to: {task}\n{history}\n"
        f"You are in step {len(steps) + 1} and see: {seen}\n\nYou may do:\n{allowed}\n\n"
        "Think step by step inside <think> </think>. Then choose one of these actions and write it "
        "inside <action> </action>."
    )
