"""The process of one part: run it, and say by the exit code how it ended.

    python -m benchmarks.gpu.part NAME RECORD DEVICE [SGLANG_PYTHON]

Exit code 0: it ran to its end. SKIPPED: it cannot run here, and the last line on stderr says why.
Anything else: it failed, and the traceback is on stderr.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu.record import SKIPPED, Record, Skipped
from stable_opd_mcore.host.cuda_driver import refuse_unused_gpus


@dataclass(frozen=True)
class Options:
    """What every part is told."""

    device: Literal["cpu", "cuda"]
    sglang_python: str  # interpreter of SGLang's environment; it may not exist
    scratch: Path  # an empty folder of this part's own

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def main() -> int:
    name, record, device, sglang_python = sys.argv[1:]
    path = Path(record)
    scratch = path.with_suffix("")
    scratch.mkdir()
    assert device in ("cpu", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        refuse_unused_gpus()
        sys.exit("torch finds no GPU; --device cpu runs every part at a tiny size")
    module = importlib.import_module(f"benchmarks.gpu.parts.{name}")
    try:
        module.run(Record(path), Options(device, sglang_python, scratch))
    except Skipped as skipped:
        print(skipped, file=sys.stderr)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
