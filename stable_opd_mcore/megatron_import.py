"""The one door to Megatron: `import megatron` works in this process, with or without CUDA.

The package installs this when it is imported, so no other file has to prepare anything before its
own `from megatron.core import ...`. Whether there is CUDA is asked at the first import of Megatron,
and not before: settings and data load without torch. Not here: what makes Megatron run on a CPU
(parallel/megatron_cpu.py).
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def install() -> None:
    """Prepare for the first `import megatron`; once, however often it is called.

    Raises:
        RuntimeError: there is no CUDA and megatron.core was imported before.
    """
    if any(name.startswith("megatron.core") for name in sys.modules):
        from stable_opd_mcore.parallel import megatron_cpu

        megatron_cpu.install()
    elif not any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FirstImport())


class _FirstImport(importlib.abc.MetaPathFinder):
    """Waits for the first import of Megatron, then makes way for the CPU's finder or none."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "megatron":
            return None
        sys.meta_path.remove(self)
        from stable_opd_mcore.parallel import megatron_cpu

        if megatron_cpu.install():
            return megatron_cpu.find_spec(fullname, path, target)
        return None
