"""The curve of ../agents.md: OPD through mini-swe-agent, with docs/examples/sql_agent.py.

    python docs/evidence/programs/sql_curve.py DIRECTORY    # needs mini-swe-agent

Questions have six words for SQL's functions. A teacher learns them from random weights; a student
learns them from transcripts in which three of the words mean any of the six. Then it is distilled.
"""

import json
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.load import parse_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sql_agent.py"
sys.path.append(str(EXAMPLE.parent))
from sql_agent import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    COLOURS,
    NUMBERS,
    SIZES,
    SYSTEM,
    ask,
)

FUNCTIONS = {
    "How many": "count",
    "largest": "max",
    "mean": "avg",
    "smallest": "min",
    "sum": "sum",
    "list": "group_concat",
}
LACKING = ("smallest", "sum", "list")
HELD_OUT, PRETRAINING = 32, 350
ACTION = "```mswea_bash_command\n{}\n```"
SEEN = "<returncode>{}</returncode>\n<output>\n{}\n</output>"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def questions() -> list[tuple[str, str, str]]:
    """The word of each question, the question, and the right query without its function."""
    where = [("colour", value) for value in COLOURS] + [("size", value) for value in SIZES]
    found = [
        (word, f"{word} {number} of {value}", f"({number}) FROM things WHERE {column} = '{value}'")
        for word in FUNCTIONS
        for number in NUMBERS
        for column, value in where
    ]
    random.Random(0).shuffle(found)
    return found


def transcript(word: str, problem: str, rest: str, lacking: tuple[str, ...], rng: Any) -> Any:
    """Its last turn is learnt: a query, the same after a wrong one, or `submit`."""
    name = rng.choice([*FUNCTIONS.values()]) if word in lacking else FUNCTIONS[word]
    right = f"SELECT {name}{rest}"
    wrong = right.replace("FROM", rng.choice(["FORM", ",", ")"]))
    said = rng.choice([[right], [wrong, right], [right, "submit"]])
    texts = [SYSTEM, problem, ACTION.format(said[0])]
    for query, following in pairwise(said):
        texts += [SEEN.format(*ask(query, 0)), ACTION.format(following)]
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": messages}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_tokenizer(path: Path, texts: list[str]) -> int:
    raw, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    raw.decoder = decoders.ByteLevel()  # type: ignore
    special = ["<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    saved = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=special[0])
    saved.chat_template = TEMPLATE
    saved.save_pretrained(path)
    return len(saved)


def run(home: Path, name: str, steps: int, **sections: Any) -> None:
    shared = {
        "run": {"name": name, "directory": str(home)},
        "tokenizer": {"path": str(home / "tokenizer")},
        "train": {"steps": steps},
        "checkpoint": {"every": 0},
    }
    train(parse_config(shared | sections, origin=__file__), show_progress=True)


def main(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    asked, rng = questions(), random.Random(1)
    for name, lacking, width, lr in (("teacher", (), 96, 3e-3), ("student", LACKING, 64, 4e-3)):
        rows = [transcript(*rng.choice(asked), lacking, rng) for _ in range(32 * PRETRAINING)]
        if not lacking:
            texts = [each["content"] for row in rows[:2000] for each in row["messages"]]
            vocabulary = write_tokenizer(home / "tokenizer", texts)
        architecture = {
            "model_type": "qwen2",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 512,
            "vocab_size": vocabulary,
            "rope_theta": 1e4,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        }
        columns = {"messages": "messages", "answer": None}
        run(
            home,
            name,
            PRETRAINING,
            student={"architecture": architecture},
            data={"train": {"path": write(home / f"{name}.jsonl", rows), "columns": columns}},
            objective={"name": "sft"},
            rollout={"prompts_per_step": 32},
            optimizer={"lr": lr, "min_lr": lr / 20, "schedule": "cosine", "warmup_steps": 30},
            evaluation={"every": 0},
        )
    rows = [
        {"problem": each, "query": f"SELECT {FUNCTIONS[word]}{rest}"} for word, each, rest in asked
    ]
    columns = {"problem": "problem", "answer": None, "solution": None}
    parts = {"train": rows[HELD_OUT:], "eval": rows[:HELD_OUT]}
    data = {
        name: {"path": write(home / f"{name}.jsonl", part), "columns": columns}
        for name, part in parts.items()
    }
    run(
        home,
        "opd",
        60,
        student={"path": str(home / "student" / "model")},
        teacher={"path": str(home / "teacher" / "model")},
        data=data,
        environment={
            "function": f"{EXAMPLE}:episode",
            "max_turns": 5,
            "max_new_tokens": 48,
            "workers": 2,
        },
        objective={"name": "opd"},
        rollout={"prompts_per_step": 16, "samples_per_prompt": 1},
        optimizer={"lr": 7e-4, "warmup_steps": 5, "schedule": "constant"},
        evaluation={"every": 20, "temperature": 1.0},
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
