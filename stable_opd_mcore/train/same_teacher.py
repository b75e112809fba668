"""Whether the servers of a teacher serve the model in teacher.path.

At the start, the first prompts and some pairs of tokens are scored by one replica, and by the
weights of teacher.path on the CPUs of the first machine (scoring/from_files.py). Nothing else shows
that a server has another base of its rotary embedding, other weights or a coarser precision: a run
would learn from that teacher and look sound.

What the files give in fp32 is the truth. A server may differ from it as far as rounding explains:
with train.precision=fp32 as a rollout server may (rollout/sglang/agreement.py), in bf16 by some
times what a forward pass in bf16 differs from it. Medians over the tokens are compared.

Letters: G temperatures, L scored tokens of all sequences.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.models import tensors
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.description.config_fields import decoder_settings, read_fields
from stable_opd_mcore.models.description.unread_settings import WITHOUT_EFFECT
from stable_opd_mcore.models.files.huggingface import STORED_AS, check_hf, stored_dtypes
from stable_opd_mcore.models.files.safetensors_files import TensorFiles
from stable_opd_mcore.parallel.world import on_first_rank
from stable_opd_mcore.rollout.sglang.agreement import median_gap, tolerance
from stable_opd_mcore.rollout.sglang.checksums import ExpectedChecksums, as_held, difference
from stable_opd_mcore.rollout.sglang.sync import reported_checksums
from stable_opd_mcore.scoring.from_files import TEMPERATURES, FileScores, scores_of_files
from stable_opd_mcore.serving import timeouts
from stable_opd_mcore.serving.client import ATTEMPTS, RefusedRequest, ServerFailure, SglangClient
from stable_opd_mcore.serving.teacher import ServedTeacher
from stable_opd_mcore.train.run import Run

_NUM_PROMPTS, _MAX_TOKENS = 4, 128  # of each prompt with its golden solution
_NUM_PAIRS = 32  # of random tokens: no position matters to the second one
_TIMES_ROUNDING = 4.0  # a server's kernels add in another order than the CPU's
_log = logging.getLogger(__name__)


def compare_with_files(run: Run, say: Callable[[str], None], progress: Callable[[], None]) -> None:
    """Compare the servers of teacher.urls with teacher.path, on rank 0, unless teacher.verify=skip.
    Collective.

    Args:
        progress: called while the files are read.

    Raises:
        UserError: they differ, and teacher.verify=refuse.
        TeacherLost: no server answers.
    """
    teacher, settings = run.served_teacher, run.config.teacher
    if teacher is None or settings is None or settings.verify == "skip":
        return
    if settings.path is None or not settings.urls:
        say("the served teacher is not compared with its files: no teacher.path with teacher.urls")
        return
    path, tolerant = settings.path, settings.verify == "warn"

    def compare() -> None:
        sequences = _sequences(run, teacher.vocab_size)
        began = time.monotonic()
        try:
            architecture = read_architecture(path)
            check_hf(path, architecture)
            files = _stored_scores(run.config, path, sequences, progress)
        except UserError as error:
            _log.warning("the served teacher is not compared with its files: %s", error)
            return
        served_L = np.concatenate(teacher.logprobs(sequences))
        seconds = time.monotonic() - began
        first_L = np.concatenate([np.arange(len(ids) - 1) == 0 for ids in sequences])
        largest = allowed(files, run.config.train.precision)
        gap = median_gap(served_L, files.logprobs_GL[0])
        gaps = [median_gap(served_L[of], files.logprobs_GL[0][of]) for of in (first_L, ~first_L)]
        text = (
            f"the log-probabilities of teacher {teacher.first_replica.url} and of {path} differ by "
            f"{gap:.3g} in the median of {len(served_L)} tokens"
        )
        if max(gaps) <= largest:
            say(f"{text}, at most {largest:.3g} is expected ({seconds:.0f} s)")
            return
        causes = "; ".join(_causes(teacher, path, architecture, served_L, files, gaps, largest))
        fault = (
            f"{text}, expected is at most {largest:.3g}: the servers are not this teacher. {causes}"
        )
        if not tolerant:
            raise UserError(
                f"{fault}. Serve teacher.path as it is, or name the directory that is served; "
                "teacher.verify=warn trains on what the servers compute"
            )
        _log.warning("%s", fault)

    on_first_rank(run.world, compare)


def allowed(files: FileScores, precision: str) -> float:
    """The largest median difference from scores in fp32 that rounding explains, in nats."""
    least = tolerance(torch.float32)
    if precision == "fp32":
        return least
    rounding = _TIMES_ROUNDING * median_gap(files.bf16_logprobs_L, files.logprobs_GL[0])
    return min(max(rounding, least), tolerance(torch.bfloat16))


def _sequences(run: Run, vocab_size: int) -> list[list[int]]:
    """The first prompts as the teacher reads them, with golden solutions, and random pairs."""
    prompts = run.prompts.select(range(min(_NUM_PROMPTS, len(run.prompts))))
    texts = [
        [*(prompt.teacher_token_ids or prompt.token_ids), *(prompt.golden_token_ids or ())]
        for prompt in prompts
    ]
    pairs = np.random.default_rng(0).integers(0, vocab_size, (_NUM_PAIRS, 2)).tolist()
    return [*(ids[:_MAX_TOKENS] for ids in texts if len(ids) > 2), *pairs]


def _stored_scores(
    config: Config, path: str, sequences: Sequence[Sequence[int]], progress: Callable[[], None]
) -> FileScores:
    """The scores of the files; those of an earlier start if files and sequences are the same."""
    about = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(Path(path).iterdir())]
    key = hashlib.sha256(repr((path, about, sequences)).encode()).hexdigest()
    stored = config.run.files.teacher_servers / "scores_of_files.npz"
    if stored.is_file():
        with np.load(stored) as arrays:
            if str(arrays["key"]) == key:
                return FileScores(arrays["fp32"], arrays["bf16"])
    found = scores_of_files(path, sequences, progress)
    content = BytesIO()
    np.savez(content, key=key, fp32=found.logprobs_GL, bf16=found.bf16_logprobs_L)
    stored.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(stored, content.getvalue())
    return found


# ---- what differs


def _causes(
    teacher: ServedTeacher,
    path: str,
    architecture: Architecture,
    served_L: NDArray[np.float32],
    files: FileScores,
    gaps: Sequence[float],
    largest: float,
) -> Iterator[str]:
    """What differs, by what the scores show, the server's settings, and the checksums of weights.

    Args:
        gaps: the median differences of second tokens, for which positions do not matter, and of
            later ones.
    """
    for temperature, own_L in zip(TEMPERATURES[1:], files.logprobs_GL[1:], strict=True):
        if median_gap(served_L, own_L) <= largest:
            yield f"temperature: its scores are those at {temperature:g}, expected is 1"
    client = teacher.first_replica
    info = client.call("GET", "/server_info", None, timeouts.QUESTION, attempts=ATTEMPTS)
    stored = stored_dtypes(path, architecture)
    dtypes = {dtype for dtype, name in STORED_AS.items() if name in stored}
    yield from different_settings(info if isinstance(info, dict) else {}, path, dtypes)
    first, later = gaps
    if first <= largest:
        yield (
            f"where one token comes before, they differ by only {first:.3g}, later by {later:.3g}: "
            "the weights agree and the positions do not (rope_theta, rope_scaling, a window)"
        )
        return
    try:
        yield different_tensors(client, info, path, architecture)
    except (ServerFailure, RefusedRequest, KeyError, TypeError, AttributeError) as error:
        yield f"its weights are not compared: {error!r}"


def different_settings(info: Mapping[str, Any], path: str, dtypes: set[str]) -> Iterator[str]:
    """The settings of a server (`/server_info`) that may change its scores.

    Args:
        dtypes: the types of the tensors in `path`.
    """
    dtype = str(info.get("dtype", "auto")).removeprefix("torch.")
    if dtype != "auto" and dtypes != {dtype}:
        yield f"dtype: {dtype} in the server, {' and '.join(sorted(dtypes))} in the files"
    for key, usual in (("quantization", None), ("load_format", "auto"), ("kv_cache_dtype", "auto")):
        if info.get(key, usual) not in (usual, dtype):
            yield f"{key}: {info[key]} in the server"
    override = info.get("json_model_override_args") or "{}"
    if override != "{}":
        yield f"--json-model-override-args {override}"
    served = info.get("model_path")
    if served is None or not (Path(str(served)) / "config.json").is_file():
        yield f"the server was started from {served}"
        return
    ours, theirs = (decoder_settings(read_fields(place)[1]) for place in (path, str(served)))
    for key in {**ours, **theirs}:
        if key not in WITHOUT_EFFECT and ours.get(key) != theirs.get(key):
            yield f"{key}: {theirs.get(key)} in {served}, {ours.get(key)} in {path}"


def different_tensors(
    client: SglangClient, info: Mapping[str, Any], path: str, architecture: Architecture
) -> str:
    """The first parameter of a server that differs from the files, by its checksum."""
    dtype = getattr(torch, str(info["dtype"]).removeprefix("torch."))
    on_gpu = str(info["device"]).startswith("cuda")
    expected = ExpectedChecksums(architecture, int(info["tp_size"]), on_gpu=on_gpu)
    with TensorFiles(Path(path), architecture) as files:
        for entry in tensors.canonical_parameters(architecture):
            for name in entry.hf_names:
                tensor = as_held(name, files.read(name, (slice(None),)), dtype, architecture)
                expected.add(name, tensor)
    found = difference(reported_checksums(client), expected.per_rank)
    if found is None:
        return f"tensors: all are equal in {dtype}, so what computes with them differs"
    return f"tensors: {found.reason}"
