"""Seconds, tokens a second and peak memory of a training step, ours and TRL's
DistillationTrainer.

    python benchmarks/step.py --trl-python /path/to/trl-venv/bin/python
    python benchmarks/step.py                     # only ours

Both do the same work: one sampled response to each of 32 prompts, the teacher's hidden states on
them, the reverse KL over the full vocabulary as a token mean, its gradient, one Adam step; fp32, on
the same weights and prompts. "ours, opd" is the method's own objective, from the teacher's
log-probabilities of the sampled tokens. Case "even": every response runs to 128 tokens. Case
"tailed": lengths of a log-normal, up to 512, imposed on both by the stop token's logit. Every
figure is a median over the measured steps of processes that run in turn. Not a test: it asserts no
speed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # started as a file, not as a module
    sys.path.insert(0, str(ROOT))

from benchmarks.step_work import EOS, Steps, Work, force_stops, resident_mib  # noqa: E402

CASES = ("even", "tailed")
VOCABULARY, PROMPTS, PROMPT_TOKENS = 2048, 32, 16
STUDENT = {"hidden_size": 256, "num_hidden_layers": 4, "heads": 4, "intermediate_size": 768}
TEACHER = {"hidden_size": 384, "num_hidden_layers": 6, "heads": 6, "intermediate_size": 1152}
MEDIAN_LENGTH, LOG_SPREAD, LONGEST = 115, 0.8, 512  # case "tailed": mean 151
MICRO_BATCH_TOKENS = 1152  # TRL's micro-batch: 8 responses of 16 + 128


def lengths_of(case: str) -> tuple[tuple[int, ...], int]:
    """Response lengths and budget of a case; "tailed" is 32 quantiles in a seeded order."""
    if case == "even":
        return (129,) * PROMPTS, 128  # the stop token would come after the last
    normal = NormalDist(math.log(MEDIAN_LENGTH), LOG_SPREAD)
    quantiles = [math.exp(normal.inv_cdf((i + 0.5) / PROMPTS)) for i in range(PROMPTS)]
    lengths = [min(LONGEST, round(length)) for length in quantiles]
    random.Random(0).shuffle(lengths)
    return tuple(lengths), LONGEST


def word_tokenizer(vocabulary: int) -> Any:
    """A tokenizer of `vocabulary` words w3, w4, ..., whose only stop token is EOS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, vocabulary))]
    assert words[EOS] == "<eos>"
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def random_words(number: int, vocabulary: int, rng: random.Random) -> str:
    return " ".join(f"w{rng.randrange(3, vocabulary)}" for _ in range(number))


def write_inputs(directory: Path, num_prompts: int) -> None:
    """Two Qwen2 models of random weights, their tokenizer of 2,048 words, prompts of 16 words."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = word_tokenizer(VOCABULARY)
    torch.manual_seed(0)
    for name, sizes in (("student", STUDENT), ("teacher", TEACHER)):
        heads = sizes["heads"]
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=sizes["hidden_size"],
            num_hidden_layers=sizes["num_hidden_layers"],
            intermediate_size=sizes["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=1024,
            initializer_range=0.02,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=EOS,
        )
        Qwen2ForCausalLM(config).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    rng = random.Random(0)
    rows = [random_words(PROMPT_TOKENS, VOCABULARY, rng) for _ in range(num_prompts)]
    lines = [json.dumps({"problem": row}) + "\n" for row in rows]
    (directory / "prompts.jsonl").write_text("".join(lines))


def settings(work: Work) -> dict[str, Any]:
    """This project's config for the work."""
    home = Path(work.directory)
    return {
        "run": {"name": "benchmark", "directory": str(home)},
        "student": {"path": str(home / "student")},
        "teacher": {"path": str(home / "teacher")},
        "data": {
            "train": {
                "path": str(home / "prompts.jsonl"),
                "columns": {"answer": None, "solution": None},
            }
        },
        "sampling": {"max_new_tokens": work.budget},
        "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": 1},
        "objective": {"name": work.objective, "divergence": "reverse"},
        "aggregation": "token_mean",
        "optimizer": {"lr": 1e-6},
        "train": {"steps": work.steps, "micro_batch_tokens": MICRO_BATCH_TOKENS},
    }


def measure_ours(work: Work) -> Steps:
    """Time this project's `train_step` in this process."""
    import torch

    from stable_opd_mcore.config.load import parse_config
    from stable_opd_mcore.inputs.run_inputs import RunInputs
    from stable_opd_mcore.parallel.world import start_world, stop_world
    from stable_opd_mcore.train.persistence.state import TrainState
    from stable_opd_mcore.train.setup import build_run
    from stable_opd_mcore.train.step import train_step

    torch.set_num_threads(work.threads)
    config = parse_config(settings(work), origin="benchmarks/step.py")
    world = start_world(config.parallel, config.train.seed)
    run = build_run(RunInputs(config), world)
    run = replace(run, engine=scripted_engine(run, work.lengths))
    steps, state = Steps(started_mib=resident_mib(peak=False)), TrainState()
    for _ in range(work.steps):
        start = time.perf_counter()
        result = train_step(run, state)
        seconds = time.perf_counter() - start
        state = result.state
        if state.step <= work.warmup_steps:
            continue
        metrics = result.metrics.values_by_key()
        response_tokens = sum(len(rollout.token_ids) for rollout in result.rollouts)
        steps.add(
            metrics["time/rollout"] or 0.0,
            metrics["time/score"] or 0.0,
            seconds,
            response_tokens,
            metrics["loss/total"] or 0.0,
        )
    steps.peak_mib = resident_mib(peak=True)
    stop_world()
    return steps


def scripted_engine(run: Any, lengths: Sequence[int]) -> Any:
    """The embedded engine; the response to prompt i of a step stops at lengths[i]."""
    from stable_opd_mcore.rollout.embedded import EmbeddedEngine
    from stable_opd_mcore.rollout.noise import row_key

    class ScriptedEngine(EmbeddedEngine):
        def generate(self, prompts, sampling, *, step):
            keys = [row_key(sampling.seed, step, prompt.prompt_id, 0) for prompt in prompts]
            self.length_of_key = dict(zip(keys, lengths, strict=True))
            return super().generate(prompts, sampling, step=step)

        def _sample(self, hidden_BH, keys_B, position, sampling):
            self.due_B = [self.length_of_key[key] == position + 1 for key in keys_B.tolist()]
            return super()._sample(hidden_BH, keys_B, position, sampling)

        def _logits(self, hidden_BH):
            return force_stops(super()._logits(hidden_BH), self.due_B)

    return ScriptedEngine(
        run.student.chunks, run.world, run.tokenizer.decode, vocab_size=run.tokenizer.vocab_size
    )


def in_own_process(work: Work, command: Sequence[str]) -> Steps:
    """Measure in a fresh process.

    Raises:
        SystemExit: the process failed (with its last lines), or trained on other lengths.
    """
    result = Path(work.directory) / "steps.json"
    finished = subprocess.run(
        [*command, json.dumps(asdict(work)), str(result)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(work.threads), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        lines = finished.stderr.strip().splitlines()[-20:]
        raise SystemExit("\n".join([f"{command} ended with {finished.returncode}", *lines]))
    steps = Steps(**json.loads(result.read_text()))
    if set(steps.response_tokens) != {work.response_tokens}:
        raise SystemExit(
            f"{command} trained on {steps.response_tokens} response tokens a step instead of "
            f"{work.response_tokens}"
        )
    return steps


def merge(runs: Sequence[Steps]) -> dict[str, Any]:
    """Medians over the steps of all processes; memory of the largest."""
    phases = ("rollout", "score", "update", "total")
    seconds = {name: median(x for run in runs for x in getattr(run, name)) for name in phases}
    return {
        "seconds": seconds,
        "fastest_step": min(x for run in runs for x in run.total),
        "slowest_step": max(x for run in runs for x in run.total),
        "tokens_per_second": runs[0].response_tokens[0] / seconds["total"],
        "started_mib": max(run.started_mib for run in runs),
        "peak_mib": max(run.peak_mib for run in runs),
        "loss": runs[0].loss[0],
        "steps": sum(len(run.total) for run in runs),
    }


def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per case and system. Within a case the systems run in turn, in alternating order."""
    from rich.console import Console

    ours = [sys.executable, "-m", "benchmarks.step", "--measure"]
    systems = {"ours": (ours, "gkd"), "ours, opd": (ours, "opd")}
    if options.trl_python:
        systems["TRL"] = ([options.trl_python, "-m", "benchmarks.trl_step"], "gkd")
    rows = []
    with tempfile.TemporaryDirectory() as scratch, Console(stderr=True).status("") as status:
        write_inputs(Path(scratch), PROMPTS * (1 + options.steps))
        for case in options.cases:
            lengths, budget = lengths_of(case)
            steps_of: dict[str, list[Steps]] = {name: [] for name in systems}
            for turn in range(options.rounds):
                names = list(systems)[:: 1 if turn % 2 == 0 else -1]
                for name in names:
                    command, objective = systems[name]
                    status.update(f"{case}: {name}, round {turn + 1} of {options.rounds}")
                    work = Work(
                        scratch, lengths, budget, 1, options.steps, options.threads, objective
                    )
                    steps_of[name].append(in_own_process(work, command))
            rows += [
                {"case": case, "system": name, **merge(runs)} for name, runs in steps_of.items()
            ]
    for row in rows:
        trl = [r for r in rows if r["case"] == row["case"] and r["system"] == "TRL"]
        row["times_trl"] = row["tokens_per_second"] / trl[0]["tokens_per_second"] if trl else None
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Seconds of a step, medians; load average {os.getloadavg()[0]:.1f}")
    for column in ("case", "system", "rollout", "score", "update", "step", "fastest to slowest"):
        table.add_column(column, justify="left" if column in ("case", "system") else "right")
    for column in ("tokens/s", "x TRL", "peak MiB", "of it in steps", "loss"):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = [f"{row['seconds'][k]:.2f}" for k in ("rollout", "score", "update", "total")]
        table.add_row(
            row["case"],
            row["system"],
            *seconds,
            f"{row['fastest_step']:.2f} to {row['slowest_step']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            "" if row["times_trl"] is None else f"{row['times_trl']:.2f}",
            f"{row['peak_mib']:,.0f}",
            f"{row['peak_mib'] - row['started_mib']:,.0f}",
            f"{row['loss']:.4f}",
        )
    Console(width=130).print(table)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--trl-python", help="python of a venv with trl 1.16; without it, ours")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a process")
    parser.add_argument("--rounds", type=int, default=2, help="processes per case and system")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        given = json.loads(options.measure[0])
        steps = measure_ours(Work(**given | {"lengths": tuple(given["lengths"])}))
        Path(options.measure[1]).write_text(json.dumps(asdict(steps)))
        return
    rows = run_all(options)
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
