"""Write the games, golden transcripts and tokenizer of docs/evidence/alfworld.md.

    python -m benchmarks.alfworld.games OUT
    python -m benchmarks.alfworld.games OUT --smoke   # three games: does it run?

The games are files game.tw-pddl for ALFWorld's engine, with its own rules and texts: "put a hot mug
from drawer 1 in shelf 1". The package `alfworld` must be installed.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.alfworld.play import append, restart, start

NUM_GAMES = {"train": 192, "eval": 64}
SMOKE_GAMES = {"train": 2, "eval": 1}
OBJECTS = ("apple", "bowl", "mug", "plate", "potato")
PLACES = {"cabinet": True, "countertop": False, "drawer": True, "shelf": False, "sidetable": False}
DEVICES = {"fridge": True, "microwave": True, "sinkbasin": False}  # name -> whether it opens
OPENS = PLACES | DEVICES
STATES = {"": "", "clean": "isClean", "cool": "isCool", "hot": "isHot"}
DETOUR = 0.15  # share of the golden commands before which a mistake is made
CHAT_TEMPLATE = (  # an observation is "... ?", and a turn of the player "... ;"
    "{% for message in messages %}{{ message['content'] }}"
    "{{ ' ;\n' if message['role'] == 'assistant' else ' ?\n' }}{% endfor %}"
)


def tasks() -> list[tuple[str, str, str, str]]:
    """All tasks in random order: object, state, its place, the wanted place."""
    found: list[tuple[str, str, str, str]] = [
        task for task in product(OBJECTS, STATES, OPENS, PLACES) if task[2] != task[3]
    ]
    random.Random(0).shuffle(found)
    return found


def game(task: tuple[str, str, str, str], seed: int) -> dict[str, Any]:
    """A room with the task's places, another one, the devices and two other objects."""
    import alfworld

    wanted, state, source, target = task
    rng = random.Random(seed)
    places = sorted({source, target, *DEVICES, rng.choice(list(PLACES))})
    at = {wanted: source}
    for other in rng.sample([each for each in OBJECTS if each != wanted], 2):
        at[other] = rng.choice(places)
    kind = {place: f"{place}Type" for place in places}  # PDDL ignores case: SinkBasinType
    ids = {p: f"{p}_bar_1" for p in places} | {"sinkbasin": "sink_bar_1_bar_sinkbasin"}
    facts = ["(= (total-cost) 0)", "(atLocation agent1 start)"]
    for place in places:
        facts.append(f"(receptacleAtLocation {ids[place]} at_{place})")
        facts.append(f"(receptacleType {ids[place]} {kind[place]})")
        facts += [f"(openable {ids[place]})"] if OPENS[place] else []
        facts += [f"(canContain {kind[place]} {each}Type)" for each in at]
    for each, place in at.items():
        item = f"{each}_bar_1"
        facts += [f"(inReceptacle {item} {ids[place]})", f"(objectAtLocation {item} at_{place})"]
        facts += [f"({can} {item})" for can in ("pickupable", "heatable", "coolable", "cleanable")]
        facts.append(f"(objectType {item} {each}Type)")
    goal = f"(inReceptacle {wanted}_bar_1 {ids[target]})"
    goal += f" ({STATES[state]} {wanted}_bar_1)" if state else ""
    kinds = {
        "agent": ["agent1"],
        "location": ["start", *(f"at_{place}" for place in places)],
        "receptacle": ids.values(),
        "object": [f"{each}_bar_1" for each in at],
        "rtype": kind.values(),
        "otype": [f"{each}Type" for each in at],
    }
    objects = " ".join(f"{' '.join(names)} - {name}" for name, names in kinds.items())
    problem = (
        f"(define (problem p{seed}) (:domain alfred) (:objects {objects}) "
        f"(:init {' '.join(facts)}) (:goal (and {goal})) (:metric minimize (total-cost)))"
    )
    said = " ".join(f"put a {state} {wanted} 1 from {source} 1 in {target} 1".split())
    data = Path(str(alfworld.__file__)).parent / "data"
    return {
        "pddl_domain": (data / "alfred.pddl").read_text(),
        "pddl_problem": problem,
        "grammar": (data / "alfred.twl2").read_text().replace("UNKNOWN GOAL", said),
        "solvable": True,
    }


def transcript(path: str, rng: random.Random) -> Iterator[list[dict[str, str]]]:
    """Conversations that each end with a command of the engine's planner, in both histories.

    Before a command the player sometimes goes to another place, or says what the engine does not
    understand. The plan holds after it, and no conversation ends with it.
    """
    engine = start(path, policy_commands=True, admissible_commands=True)
    state = engine.reset()
    moves = [each for each in state.admissible_commands if each.startswith("go to")]
    plan = list[tuple[str, bool]]()
    for command in state.policy_commands:
        if rng.random() < DETOUR:
            wrong = f"open {rng.choice(OBJECTS)} 1"
            if command in moves:
                wrong = rng.choice([each for each in moves if each != command])
            plan.append((wrong, False))
        plan.append((command, True))
    engine.close()
    for function in (append, restart):
        playing = function({"game": path}, 0)
        shown, context = next(playing), list[dict[str, str]]()
        with suppress(StopIteration):
            for command, golden in plan:
                if isinstance(shown, dict):
                    shown, context = shown["restart"], []
                context.append({"role": "user", "content": shown})
                context.append({"role": "assistant", "content": command})
                if golden:
                    yield [*context]
                shown = playing.send(command)


def write_tokenizer(texts: list[str], directory: Path) -> None:
    """One token for each word and each punctuation mark; a new line ends a message."""
    split = pre_tokenizers.Whitespace()
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text)}
    vocabulary = ["<pad>", "<unk>", ";", "?", *sorted(words - {";", "?"})]
    model = models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token=";"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    print(f"{len(vocabulary)} tokens in {directory}")


def write(directory: Path, num_games: Mapping[str, int]) -> None:
    (directory / "games").mkdir(parents=True, exist_ok=True)
    every = iter(enumerate(tasks()))
    for split, count in num_games.items():
        rows = list[dict[str, str]]()
        for _ in range(count):
            seed, task = next(every)
            path = directory / "games" / f"{seed}.tw-pddl"
            path.write_text(json.dumps(game(task, seed)))
            rows.append({"game": str(path)})
        write_rows(directory / f"{split}.jsonl", rows)
        if split == "train":
            write_golden(directory, [row["game"] for row in rows])


def write_golden(directory: Path, paths: Iterable[str]) -> None:
    rng = random.Random(1)
    golden = [{"messages": messages} for path in paths for messages in transcript(path, rng)]
    rng.shuffle(golden)
    write_rows(directory / "golden.jsonl", golden)
    texts = [each["content"] for row in golden for each in row["messages"]]
    write_tokenizer(texts, directory / "tokenizer")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    print(f"{len(lines)} rows in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--smoke", action="store_true", help="three games")
    options = parser.parse_args()
    write(options.directory, SMOKE_GAMES if options.smoke else NUM_GAMES)


if __name__ == "__main__":
    main()
