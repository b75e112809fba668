"""Log-probabilities of given sequences by the weights of a model directory, on this machine's CPUs.

    scores = scores_of_files(directory, sequences)

For a model that other servers hold: the trainer's GPUs may have no room for it. A process of its
own builds the whole model, whose memory the system gives only once it is written, and fills each
layer just before its forward pass and frees it afterwards. So it needs the embedding, the output
head and one layer, in fp32. Not here: what the scores are compared with (train/same_teacher.py).

Letters: G temperatures, L scored tokens of all sequences.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stable_opd_mcore.config.training import ParallelConfig
from stable_opd_mcore.data.packing import pack
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.files.safetensors_files import TensorFiles
from stable_opd_mcore.models.gpt import Precision, build_model
from stable_opd_mcore.models.hidden_states import forward_hidden, output_head
from stable_opd_mcore.models.weights import fill_weights
from stable_opd_mcore.parallel.world import World, start_world, stop_world
from stable_opd_mcore.records import Sample
from stable_opd_mcore.sample_facts import SampleWeights
from stable_opd_mcore.scoring.token_scores import score

TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.2, 1.5, 2.0)
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_LAUNCHERS += ("SLURM_", "OMPI_", "PMI_", "OMP_NUM_THREADS")
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class FileScores:
    """What a directory's weights give each sequence's tokens after the first, in nats."""

    logprobs_GL: NDArray[np.float32]  # computed in fp32, at each of TEMPERATURES
    bf16_logprobs_L: NDArray[np.float32]  # computed in bf16, at temperature 1


def scores_of_files(
    directory: str | Path,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[], None] = lambda: None,
) -> FileScores:
    """Score sequences of at least two tokens by the weights of a directory.

    Raises:
        UserError: `read_architecture` or `load_hf` would refuse the directory, or the process
            failed; the message has the end of what it printed.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    cores = len(os.sched_getaffinity(0))
    environment = kept | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(cores)}
    environment["MALLOC_MMAP_THRESHOLD_"] = str(2**20)  # else malloc keeps a layer that is freed
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "request.json", Path(folder) / "scores.npz"
        given.write_text(json.dumps([str(directory), [list(map(int, s)) for s in sequences]]))
        command = [sys.executable, "-m", __name__, str(given), str(made)]
        with (Path(folder) / "output").open("w+b") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            try:
                while process.poll() is None:
                    progress()
                    time.sleep(_POLL_SECONDS)
            finally:
                process.kill()
            output.seek(0)
            text = output.read().decode(errors="replace").strip()
        if process.returncode:
            last = text.splitlines()[-1] if text else "it printed nothing"
            raise UserError(f"{directory}: not scored (exit {process.returncode}): {last}")
        with np.load(made) as arrays:
            return FileScores(arrays["fp32"], arrays["bf16"][0])


# ---- in the process of its own


def _main(given: str, made: str) -> None:
    """Score the sequences of the file `given`, in fp32 and in bf16, into the file `made`."""
    directory, sequences = json.loads(Path(given).read_text())
    try:
        architecture = read_architecture(directory)
        world = start_world(ParallelConfig(), seed=0)
        with TensorFiles(Path(directory), architecture) as files:
            files.check()
            scored = partial(_scored, files, architecture, world, sequences)
            exact, rounded = scored("fp32", TEMPERATURES), scored("bf16", (1.0,))
            if files.fault is not None:
                raise UserError(files.fault)
        stop_world()
    except UserError as error:
        sys.exit(str(error))
    np.savez(made, fp32=exact, bf16=rounded)


@torch.no_grad()
def _scored(
    files: TensorFiles,
    architecture: Architecture,
    world: World,
    sequences: Sequence[Sequence[int]],
    precision: Precision,
    temperatures: Sequence[float],
) -> NDArray[np.float32]:
    """Log-probabilities [G, L] at these temperatures."""
    (chunk,) = build_model(architecture, world, precision=precision, trainable=False, seed=None)
    layers: Any = chunk.decoder.layers
    of_layers = {id(weight) for weight in layers.parameters()}
    fill = partial(fill_weights, [chunk], files.read)
    fill([weight for weight in chunk.parameters() if id(weight) not in of_layers])
    for layer in layers:
        layer.register_forward_pre_hook(lambda own, _: fill(own.parameters()))
        layer.register_forward_hook(lambda own, *_: _free(own.parameters()))
    samples = [_sample(ids) for ids in sequences]
    tokens = sum(map(len, sequences))
    (batch,) = pack(samples, SampleWeights(*np.zeros((3, len(samples)))), max_tokens=tokens)
    hidden_NH = forward_hidden(chunk, batch).index_select(0, batch.rows_N)
    head = output_head([chunk])
    assert head is not None
    starts_B = torch.tensor([0, *np.cumsum([len(s.places) for s in samples])[:-1]])
    place_N = starts_B[batch.sample_index_N] + batch.token_index_N
    found_GL = torch.empty(len(temperatures), len(place_N))
    for row_L, temperature in zip(found_GL, temperatures, strict=True):
        row_L[place_N] = _own(score(hidden_NH, head, batch.targets_N, temperature=temperature))
    return found_GL.numpy()


def _own(scores: Any) -> Tensor:
    return scores.token_logprob_N.float()


def _free(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        weight.data = weight.data.new_empty(0)


def _sample(token_ids: Sequence[int]) -> Sample:
    """All tokens after the first are scored."""
    places = np.arange(1, len(token_ids), dtype=np.int32)
    ids = np.array(token_ids, np.int32)
    return Sample("rollout", "", ids, places, 1, trained=np.ones(len(places), np.bool_))


if __name__ == "__main__":
    _main(*sys.argv[1:])
