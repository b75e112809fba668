"""The one door to Megatron and to Transformer Engine.

`import megatron` works with and without CUDA; `import transformer_engine` loads the CUDA libraries
of this environment. The package installs this import hook when it is imported. The hook loads torch
and looks for CUDA at the first import of Megatron: settings and data load without torch.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from stable_opd_mcore.host.cuda_libraries import prefer_own_libraries


def install() -> None:
    """Put the hook in front of Python's import system. Called once, by the package itself.

    Raises:
        RuntimeError: megatron.core was imported before, and there is no CUDA.
    """
    if "megatron.core" in sys.modules:
        from stable_opd_mcore.parallel import megatron_cpu

        if megatron_cpu.is_needed():
            raise RuntimeError(
                "import stable_opd_mcore before the first import of megatron.core: without CUDA, "
                "Megatron must be rewritten while it is imported"
            )
    sys.meta_path.insert(0, _MegatronFinder())


class _MegatronFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The rewritten module of Megatron; else None, which leaves the import to Python."""
        if fullname == "transformer_engine":
            prefer_own_libraries()
        if fullname.partition(".")[0] != "megatron":
            return None
        from stable_opd_mcore.parallel import megatron_cpu

        return megatron_cpu.find_spec(fullname, path, target) if megatron_cpu.is_needed() else None
