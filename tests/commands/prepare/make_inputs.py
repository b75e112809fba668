"""Small preparations: shards like OpenR1-Math-220k's with what becomes of each row, a student."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stable_opd_mcore.commands.prepare.options import Preparation, preparation_of
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS

SCHEMA = pa.schema(
    [
        *[(name, pa.string()) for name in ("problem", "solution", "answer", "problem_type")],
        *[(name, pa.string()) for name in ("question_type", "source", "uuid")],
        ("is_reasoning_complete", pa.list_(pa.bool_())),
        ("generations", pa.list_(pa.string())),
        ("correctness_math_verify", pa.list_(pa.bool_())),
        ("correctness_llama", pa.list_(pa.bool_())),
        ("finish_reasons", pa.list_(pa.string())),
        ("correctness_count", pa.int64()),
        ("messages", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
    ]
)
NO_CORRECT = "no correct and complete generation"
TOO_LONG = "longer than 60 tokens"
CONTROL = "<|im_end|>"


def benchmark_text(name: str, number: int) -> str:
    """A problem of 20 words that no other problem shares 13 words with."""
    words = random.Random(f"{name}{number}").sample(WORDS, 20)
    return f"Find ${number}$: {' '.join(words)}?"


WORDS = [a + b for a in "bcdfghjklmnprstvz" for b in ("an", "el", "ir", "om", "ut", "ax", "oy")]


def write_benchmarks(folder: Path, rows: int = 3) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, benchmark in BENCHMARKS.items():
        lines = [
            json.dumps({benchmark.problem: benchmark_text(name, i), benchmark.answer: str(i)})
            for i in range(rows)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def good(number: int, rng: random.Random) -> dict[str, Any]:
    words = [rng.choice(WORDS) for _ in range(20)]
    texts = [f"<think>\n{' '.join(words)}\n</think>\n{number}", f"{' '.join(words)} so {number}"]
    return {
        "problem": f"Row {number}: how many {' '.join(rng.sample(WORDS, 16))}?",
        "answer": str(number),
        "question_type": "math-word-problem",
        "is_reasoning_complete": [True, True],
        "generations": texts,
        "correctness_math_verify": [True, True],
    }


def kinds(number: int, row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every kind of row that is dropped, with its reason; "" for kinds that are kept."""
    name = list(BENCHMARKS)[number % 6]
    planted = benchmark_text(name, number % 3)
    long = [" ".join(["far"] * 300)] * 2
    return [
        ("empty problem", {"problem": None}),
        ("empty answer", {"answer": None}),
        ("empty answer", {"answer": "  "}),
        ("proof", {"question_type": "proof"}),
        ("proof", {"answer": "Proof"}),
        (NO_CORRECT, {"correctness_math_verify": [False, False]}),
        (NO_CORRECT, {"correctness_math_verify": None}),
        (NO_CORRECT, {"is_reasoning_complete": [False, False]}),
        (NO_CORRECT, {"is_reasoning_complete": None}),
        (NO_CORRECT, {"finish_reasons": ["length", "length"]}),
        (NO_CORRECT, {"generations": None, "correctness_math_verify": []}),
        ("malformed", {"correctness_math_verify": [True]}),
        (TOO_LONG, {"generations": long}),
        ("control token in the problem", {"problem": f"{row['problem']} {CONTROL}"}),
        ("control token in every solution", {"generations": [f"a {CONTROL} b"] * 2}),
        ("every solution is the bare answer", {"generations": [row["answer"]] * 2}),
        (f"stands in {name} (exact)", {"problem": planted.upper().replace(" ", "  ")}),
        (f"stands in {name} (exact)", {"problem": f"\\text{{{planted}}}", "answer": None}),
        (f"stands in {name} (13-gram)", {"problem": f"Exam: {planted} Reason step by step."}),
        ("", {"generations": [long[0], row["generations"][1]]}),
        ("", {"correctness_llama": [True, None], "finish_reasons": ["length", "stop"]}),
    ]


def make_rows(count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and their reasons ("" is kept). Every third row is of a special kind, in turns."""
    rng = random.Random(0)
    rows, reasons = [], []
    for number in range(count):
        row, reason = good(number, rng), ""
        if number % 3 == 1:
            special = kinds(number, row)
            reason, changes = special[number // 3 % len(special)]
            row |= changes
        elif number % 30 == 2 and rows and reasons[-2] == "":  # a near-duplicate of another row
            row["problem"] = f" {rows[-2]['problem'].upper().replace(' ', '  ')}"
        rows.append(row)
        reasons.append(reason)
    return rows, reasons


def word_tokenizer(folder: Path) -> Path:
    raw = Tokenizer(models.WordLevel({"?": 0, "<|im_end|>": 1}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    backend.save_pretrained(str(folder))
    return folder


NUM_ROWS = 260


def make_inputs(folder: Path) -> list[str]:
    """Shards, benchmarks and a student in a folder; the reasons of the rows."""
    rows, reasons = make_rows(NUM_ROWS)
    (folder / "openr1").mkdir(parents=True)
    size = -(-NUM_ROWS // 3)
    for shard in range(3):
        table = pa.Table.from_pylist(rows[shard * size : (shard + 1) * size], SCHEMA)
        path = folder / "openr1" / f"train-{shard:05d}-of-00003.parquet"
        pq.write_table(table, path, row_group_size=25)
    write_benchmarks(folder / "benchmarks")
    word_tokenizer(folder / "student")
    return reasons


def small_preparation(inputs: Path, directory: Path, **changes: Any) -> Preparation:
    options: dict[str, Any] = {
        "student": str(inputs / "student"),
        "student_revision": None,
        "recipe": "openr1",
        "source": str(inputs / "openr1"),
        "directory": directory,
        "benchmarks": inputs / "benchmarks",
        "revision": None,
        "sft_rows": 100,
        "max_tokens": 60,
        "seed": 0,
        "columns": {},
    }
    return preparation_of(**options | changes)
