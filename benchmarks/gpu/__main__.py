"""The command line of the suite. Exit code 0: no part failed; 1: one did, or ran out of time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.report import JSON_FILE, MARKDOWN_FILE, write_results
from benchmarks.gpu.suite import PARTS, PartResult, run_part


def main() -> int:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        epilog="parts: " + "; ".join(f"{part.name}: {part.title}" for part in PARTS),
    )
    parser.add_argument(
        "--parts", nargs="+", choices=names, default=names, help="run these, and the first"
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
    options = parser.parse_args()
    if options.smoke:
        options.parts, options.device = names[:1], "cpu"
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: list[PartResult] = []
    for part in PARTS:
        if part.name not in (names[0], *options.parts):  # the first gives the table its versions
            continue
        result = run_part(part, folder, options.device, options.sglang_python)
        results.append(result)
        write_results(results, folder, options.device)
        line = f"{result.name:<12} {result.status:<12} {result.seconds:5.0f} s  {result.reason}"
        print(line.rstrip(), flush=True)
    print(f"{folder / MARKDOWN_FILE}\n{folder / JSON_FILE}")
    return int(any(result.status in ("failed", "out of time") for result in results))


if __name__ == "__main__":
    sys.exit(main())
