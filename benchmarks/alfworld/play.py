"""Environments of docs/evidence/alfworld.md: one of ALFWorld's games in a few words.

`append` and `restart` play the same game. The first shows what is new since the last action; the
second begins a new context in every step, with the last two steps, as configs/recipes/alfworld.py.
The engine parses its rules and the game again whenever it needs them. Here each process keeps the
results, which makes a step five times as fast and changes no text.
"""

import copy
from collections.abc import Generator
from functools import lru_cache
from typing import Any

HISTORY = 2  # steps that `restart` shows again
INTRO = "Looking quickly around you, you"


def append(row: dict[str, Any], seed: int) -> Generator[str, str, float]:
    game = start(row["game"])
    try:
        state = game.reset()
        task, seen = read(state)
        said = yield f"{task}. {seen}"
        while True:
            state, _, _ = game.step(said.strip())
            if state.won:
                return 1.0
            said = yield state.feedback
    finally:
        game.close()


def restart(row: dict[str, Any], seed: int) -> Generator[dict[str, str], str, float]:
    playing, steps = append(row, seed), list[str]()
    task, _, seen = next(playing).partition(". ")
    try:
        while True:
            said = yield {"restart": " ".join([f"{task}.", *steps[-HISTORY:], seen])}
            steps.append(f"{seen} > {said.strip()} .")
            seen = playing.send(said)
    except StopIteration as end:
        return end.value
    finally:
        playing.close()


def start(path: str, **infos: bool) -> Any:
    import textworld  # here, so that a config is planned and checked without it
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

    remember()
    wanted = textworld.EnvInfos(won=True, **infos)
    return textworld.start(path, request_infos=wanted, wrappers=[AlfredDemangler(shuffle=False)])


def read(state: Any) -> tuple[str, str]:
    """The task and what the engine says first, without its welcome."""
    seen, _, task = state.feedback.partition("Your task is to: ")
    return task.strip().rstrip("."), "You " + seen.partition(INTRO)[2].strip()


@lru_cache
def remember() -> None:
    """Let the engine keep what it has parsed; symbols are copied, since they hold a context."""
    import fast_downward
    from textworld.envs.pddl import logic, textgen
    from textworld.logic import Rule

    symbols = lru_cache(4096)(textgen._parse_and_convert)
    textgen._parse_and_convert = lambda *a, **k: copy.deepcopy(symbols(*a, **k))
    Rule.parse_conjunctive_query = lru_cache(4096)(Rule.parse_conjunctive_query)
    grammar = lru_cache(64)(logic._parse_and_convert)
    logic._parse_and_convert = lambda *a, **k: copy.deepcopy(grammar(*a, **k))
    fast_downward.pddl2sas = lru_cache(512)(fast_downward.pddl2sas)
