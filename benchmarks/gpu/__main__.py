"""The command line of the suite. Exit code 0: no part that gates failed; 1: one did, or ran out of
time.

A part that has passed is not run again into the same folder, so that after a fix the same command
continues where the last one failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu.advice import lines_of, verdict
from benchmarks.gpu.report import JSON_FILE, MARKDOWN_FILE, read_results, versions_of, write_results
from benchmarks.gpu.suite import PARTS, PartResult, run_part

NAMES = [part.name for part in PARTS]


def main() -> int:
    options = _parser().parse_args()
    if options.smoke:
        options.parts, options.device = list(NAMES[:1]), "cpu"
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    before = read_results(folder, options.device)
    results: dict[str, PartResult] = {}
    for part in PARTS:
        is_environment = part.name == NAMES[0]  # always run: it gives the table its versions
        if not is_environment and part.name not in options.parts:
            continue
        last = before.get(part.name)
        if last is not None and last.status == "ok" and not (is_environment or options.again):
            print(f"{part.name:<12} passed at {last.ended} and is not run again (--again)")
            results[part.name] = last
            continue
        is_first = last is None or last.status == "out of time"
        result = run_part(part, folder, options.device, options.sglang_python, is_first=is_first)
        results[part.name] = result
        if is_environment:
            before = _still_valid(before, result)
        write_results(_in_order(before | results), folder, options.device)
        print("\n".join(lines_of(result)), flush=True)
    text, is_good = verdict(_in_order(before | results))
    print(f"{text}\n{folder / MARKDOWN_FILE}\n{folder / JSON_FILE}")
    return int(not is_good)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        epilog="parts: " + "; ".join(f"{part.name}: {part.title}" for part in PARTS),
    )
    parser.add_argument(
        "--parts", nargs="+", choices=NAMES, default=NAMES, help="run these, and the first"
    )
    parser.add_argument(
        "--again", action="store_true", help="also run parts that have passed into this folder"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: every part at a tiny size; its times mean nothing",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="the first part on the CPU: does the suite run?"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results")
    parser.add_argument(
        "--sglang-python",
        default=".venv-sglang/bin/python",
        help="interpreter of the environment that holds SGLang",
    )
    return parser


def _still_valid(before: dict[str, PartResult], environment: PartResult) -> dict[str, PartResult]:
    """The results from before, none if they are of other versions: a table has one environment."""
    old = before.get(environment.name)
    if old is None or versions_of(old) == versions_of(environment):
        return before
    print(f"versions differ from those of {old.ended}, so every part runs again")
    return {}


def _in_order(results: Mapping[str, PartResult]) -> list[PartResult]:
    return [results[name] for name in NAMES if name in results]


if __name__ == "__main__":
    sys.exit(main())
