"""Runs on golden turns: as solutions, against a row for each turn; and as the beginning of
rollouts, against prompts that have them."""

import json
from pathlib import Path
from typing import Any

import pytest

from stable_opd_mcore.commands.train.train import train
from tests.parallel.launch import run_ranks
from tests.train.runs import ALONE, metrics_of, tiny_config


def turns_of(number: int) -> list[dict[str, str]]:
    problems = [(number, 1), (1, number), (number, 0)]
    return [
        {"role": role, "content": content}
        for a, b in problems
        for role, content in (("user", f"{a}+{b}"), ("assistant", f"{a}+{b}={a + b};[{a + b}]"))
    ]


def golden_run(
    directory: Path,
    name: str,
    golden: str,
    rows: list[object],
    rollout: Any = (),
    **sections: object,
) -> None:
    file = directory / f"{name}_rows" / "rows.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    columns = {"messages": "messages", "answer": None, "golden": golden}
    settings: dict[str, object] = {
        "data": {"train": {"path": str(file), "columns": columns}},
        "rollout": {"prompts_per_step": len(rows), "samples_per_prompt": 2, **dict(rollout)},
        "sampling": {"max_new_tokens": 8},
        "train": {"steps": 2, "micro_batch_tokens": 192},
        "optimizer": {"lr": 1e-3, "warmup_steps": 0, "schedule": "constant"},
        **sections,
    }
    train(tiny_config(directory, name, **settings), show_progress=False)


def runs(rank: int, world_size: int, directory: str) -> None:
    home, transcripts = Path(directory), [turns_of(number) for number in (1, 2, 3, 4)]
    prefixes = [turns[:end] for turns in transcripts for end in (2, 4, 6)]
    sft = {"objective": {"name": "sft"}, **ALONE}
    golden_run(home, "together", "all", transcripts, **sft)
    golden_run(home, "apart", "last", prefixes, **sft)
    gkd = {"name": "gkd", "on_policy_fraction": 0.5}
    golden_run(home, "gkd", "all", transcripts, objective=gkd)
    begun = {"prefix": {"by": "golden", "first": 2}}  # all but the last golden turn
    no_golden = {"mixture": {"lambda": 0.0}}
    golden_run(home, "begun", "all", transcripts, begun, **no_golden)
    golden_run(home, "asked", "last", transcripts, **no_golden)


def test_all_golden_turns_train_as_a_row_for_each_turn_would(tmp_path):
    run_ranks(1, runs, str(tmp_path))
    together, apart = (metrics_of(tmp_path / name) for name in ("together", "apart"))
    for ours, theirs in zip(together, apart, strict=True):
        for key in ("loss/sft", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)
    assert len(metrics_of(tmp_path / "gkd")) == 2
    begun, asked = (metrics_of(tmp_path / name) for name in ("begun", "asked"))
    of_prefix = {"share": 1, "turns_mean": 2, "accuracy": None}
    for ours, theirs in zip(begun, asked, strict=True):
        assert ours == theirs | {f"rollout/prefix_{key}": value for key, value in of_prefix.items()}
