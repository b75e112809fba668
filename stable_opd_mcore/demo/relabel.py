"""Copy a model so that it ends its responses with the task's other stop token.

Everything else about the model is unchanged. Not here: training (run.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file

from stable_opd_mcore.data.synthetic import SECOND_STOP, STOP, VOCABULARY
from stable_opd_mcore.host.atomic_files import atomic_directory
from stable_opd_mcore.host.tensor_files import save_tensors

WEIGHTS = "model.safetensors"


def swap_stop_tokens(source: Path, target: Path) -> None:
    """Write `source` to `target` atomically, with the rows of the two stop tokens exchanged.

    The rows are exchanged in the embedding and in the output head.
    """
    weights = load_file(source / WEIGHTS)
    first, second = VOCABULARY.index(STOP), VOCABULARY.index(SECOND_STOP)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name][[first, second]] = weights[name][[second, first]]
    with atomic_directory(target) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        save_tensors(weights, partial / WEIGHTS)
