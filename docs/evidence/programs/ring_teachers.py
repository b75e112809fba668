"""What a teacher may know and play, on the demo's ring (../ring_teachers.md).

    python docs/evidence/programs/ring_teachers.py DIRECTORY [HH:MM]

Trains a teacher, a student of each of three seeds, and each of them in all arms. Finished runs are
kept, so the same command continues; after HH:MM no other run begins. The student also learns to
read notes: half of its transcripts begin with random distances, which the player then says. The
teacher of `teacher_turns` is served by SGLang on the CPU (`make sglang`).
"""

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from stable_opd_mcore.commands.demo import ring
from stable_opd_mcore.commands.demo.agents import MAX_TURNS, STARTS
from stable_opd_mcore.commands.demo.recipe import MODELS
from stable_opd_mcore.data.synthetic import VOCABULARY, ArithmeticOptions, is_unknown

SEEDS, STEPS = 3, 30
PRETRAINING = {"teacher": (200, 32), "student": (250, 64)}  # steps, and transcripts in each
HERE, DEMO = Path(__file__).resolve(), Path(ring.__file__).parent
COLUMNS = {"messages": "messages", "golden": "all", "answer": None}
GAME = {"function": f"{HERE}:episode", "max_turns": MAX_TURNS, "workers": 1}
ARMS: dict[str, dict[str, Any]] = {
    "opd": {},
    "self_feedback": {"teacher": {"path": "self", "prompt": {"function": f"{HERE}:feedback"}}},
    "self_sibling": {"teacher": {"path": "self", "prompt": {"function": f"{HERE}:sibling"}}},
    "teacher_turns": {"rollout": {"prefix": {"by": "teacher", "last": 3, "decay_steps": 20}}},
    "golden_prefix": {"rollout": {"prefix": {"by": "golden"}}},
    "horizon": {"environment": {"horizon_start": 1, "horizon_steps": 15}},
    "grpo": {"teacher": None, "objective": {"name": "grpo"}},
}


def episode(row: Mapping[str, Any], seed: float) -> Generator[Any, str, tuple[float, str]]:
    """The ring; its feedback is the right distances from the floors that were visited."""
    game, floors = ring.episode(row, seed), [row["floor"]]
    said, reward = (yield next(game)), 0.0
    for turn in range(MAX_TURNS):
        try:
            seen = str(game.send(said))
        except StopIteration as end:
            reward = end.value
            break
        if turn + 1 < MAX_TURNS:
            floors.append(int(seen[1]))
            said = yield seen
    goal = row["goal"]
    return reward, note(goal, {each: (goal - each) % ring.FLOORS for each in floors})


def note(goal: int, distances: Mapping[int, int]) -> str:
    return "".join(f"{goal}-{floor}={each};" for floor, each in distances.items())


def feedback(row: Mapping[str, Any], rollout: Any, others: Sequence[Any]) -> str | None:
    """The note of the environment, before the prompt."""
    return rollout.feedback and f"{rollout.feedback}_{row['floor']}{row['goal']}"


def sibling(row: Mapping[str, Any], rollout: Any, others: Sequence[Any]) -> str | None:
    """What the shortest other attempt that succeeded said, before the prompt."""
    right = [other.messages for other in others if other.reward == 1]
    if not right:
        return None
    turns = [each["content"] for each in min(right, key=len) if each["role"] == "assistant"]
    said = "".join(dict.fromkeys(turn.split("[")[0] for turn in turns))
    return f"{said}_{row['floor']}{row['goal']}"


def transcript(options: ArithmeticOptions, index: int, reads: bool) -> dict[str, Any]:
    """A game of a player with the facts of `options`; with `reads`, half begin with a note, whose
    distances are random."""
    rng = random.Random(f"{options.seed}/notes/{index}")
    floor, goal = STARTS[index % len(STARTS)]
    row = {"floor": floor, "goal": goal}

    def guess(at: int) -> int:
        lacks = is_unknown(options, goal, "-", at)
        return rng.randrange(ring.FLOORS) if lacks else (goal - at) % ring.FLOORS

    def play(believed: Mapping[int, int]) -> tuple[list[dict[str, str]], dict[int, int]]:
        game, seen, messages, said = ring.episode(row, rng.random()), f"_{floor}{goal}", [], {}
        next(game)
        with contextlib.suppress(StopIteration):
            for _ in range(MAX_TURNS):
                at = int(seen[1])
                said[at] = believed[at] if at in believed else guess(at)
                text = f"{goal}-{at}={said[at]};[{said[at]}]"
                messages.append({"role": "user", "content": seen})
                messages.append({"role": "assistant", "content": text})
                seen = str(game.send(text))
        return messages, said

    known: dict[int, int] = {}
    if reads and rng.random() < 0.5:
        _, known = play({at: rng.randrange(ring.FLOORS) for at in range(ring.FLOORS)})
    messages, _ = play(known)
    messages[0]["content"] = note(goal, known) + messages[0]["content"]
    return row | {"messages": messages}


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def model_run(home: Path, name: str, seed: int) -> dict[str, Any]:
    """The demo's model, trained on transcripts of the ring only."""
    shared = OmegaConf.load(DEMO / "supervised.yaml")
    config: Any = OmegaConf.merge(shared, MODELS[name])
    lacks = config.data.train.options.get("unknown", 0.0)
    options = ArithmeticOptions.model_validate({"seed": 1000 + seed, "unknown": lacks})
    steps, batch = PRETRAINING[name]
    rows = [transcript(options, index, name == "student") for index in range(batch * steps)]
    changes = {
        "run": {"name": name, "directory": str(home)},
        "student": {
            "architecture": {"vocab_size": len(VOCABULARY), "max_position_embeddings": 256}
        },
        "rollout": {"prompts_per_step": batch},
        "optimizer": {"min_lr": 0.05 * config.optimizer.lr},
        "train": {"seed": seed, "steps": steps},
    }
    config = OmegaConf.to_container(OmegaConf.merge(config, changes))
    config["data"]["train"] = {"path": written(home / f"{name}.jsonl", rows), "columns": COLUMNS}
    return config


def arm_run(home: Path, name: str, seed: int, url: str | None) -> dict[str, Any]:
    knowing = ArithmeticOptions.model_validate({"seed": seed})
    starts = [transcript(knowing, index, False) for index in range(10 * len(STARTS))]
    source: dict[str, Any] = {"name": "ring", "columns": COLUMNS}
    source["path"] = written(home / "starts.jsonl", starts)
    shared = OmegaConf.load(DEMO / "collapse.yaml")
    teacher = {"path": str(home.with_name("teacher") / "model")}
    changes = {
        "run": {"name": name, "directory": str(home)},
        "student": {"path": str(home / "student" / "model")},
        "sampling": {"max_new_tokens": 24},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "environment": GAME,
        "train": {"seed": seed, "steps": STEPS},
        "optimizer": {"warmup_steps": 5},
        "evaluation": {"every": STEPS, "num_samples": 8, "also_greedy": False},
    }
    config: Any = OmegaConf.to_container(OmegaConf.merge(shared, changes))
    train = [source]
    if name == "golden_prefix":
        source["environment"] = {}
    config["data"] = {"train": train, "eval": {**source, "limit": len(STARTS)}}
    for key in ("name", "environment"):
        config["data"]["eval"].pop(key, None)
    if name == "teacher_turns":
        config["student"]["window"] = 240  # servers need some positions themselves
        teacher |= {"engine": "sglang", "urls": [url], "api_key_file": str(home / "key")}
    own: Any = OmegaConf.to_container(OmegaConf.merge({"teacher": teacher}, ARMS[name]))
    if own["teacher"] and own["teacher"]["path"] == "self":
        own["teacher"]["weights"] = "frozen"
    merged: Any = OmegaConf.to_container(OmegaConf.merge(config, own))
    if name == "grpo":
        del merged["objective"]["stop_class"]
    return merged


@contextlib.contextmanager
def served(model: Path, home: Path) -> Iterator[str]:
    """A real SGLang server with this model; yields its address."""
    from stable_opd_mcore.serving.command import ServerOptions
    from stable_opd_mcore.serving.process import SglangServer

    python = HERE.parents[3] / ".venv-sglang" / "bin" / "python"
    settings = ("--max-total-tokens", "16384")
    options = ServerOptions(str(python), str(model), dummy_weights=False, arguments=settings)
    server = SglangServer(options, home / "server.log")
    key = home / "key"
    key.touch(0o600)
    key.write_text(server.api_key)
    server.start()
    try:
        server.wait_until_healthy()
        yield server.url
    finally:
        server.stop()


def work(home: Path, name: str, seed: int) -> None:
    from stable_opd_mcore.commands.train.train import train
    from stable_opd_mcore.config.load import parse_config

    with contextlib.ExitStack() as stack:
        url = None
        if name == "teacher_turns":
            url = stack.enter_context(served(home.with_name("teacher") / "model", home))
        config = arm_run(home, name, seed, url) if name in ARMS else model_run(home, name, seed)
        train(parse_config(config, origin=str(HERE)), show_progress=False, accept_changes=True)


def table(directory: Path) -> None:
    """Success of the finished runs before and after their steps."""
    for name in ARMS:
        for seed in range(SEEDS):
            run = directory / f"seed{seed}" / name
            if not (run / "model").is_dir():
                continue
            rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
            found = [f"{row['eval/accuracy']:.3f}" for row in rows if "eval/accuracy" in row]
            print(f"{name:14} {seed}", *found)


def main(directory: Path, until: str = "23:59") -> None:
    runs = [(directory, "teacher", 0)]
    for seed in range(SEEDS):
        runs += [(directory / f"seed{seed}", name, seed) for name in ("student", *ARMS)]
    for home, name, seed in runs:
        if (home / name / "model").is_dir():
            continue
        if time.strftime("%H:%M") >= until:
            print(f"stopped at {until}")
            return
        began, cpu = time.monotonic(), os.times()
        work(home, name, seed)
        spent = sum(os.times()[:4]) - sum(cpu[:4])
        print(f"{seed}/{name}: {time.monotonic() - began:.0f} s, {spent:.0f} s of CPU")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
    table(Path(sys.argv[1]).resolve())
