"""Host work of a training step on one data-parallel rank: CPU seconds, bytes and memory, by phase.

    python -m benchmarks.host                                  # the tables of BENCHMARKS.md
    python -m benchmarks.host --rollouts 1024 --ranks 8        # one point: all rollouts, all ranks
    python -m benchmarks.host --rollouts 512 --ranks 1 --tokens 32768

The functions of the step run as they are, without a model: samples, facts, minibatches, packing,
metrics and the file of rollouts. One process plays rank 0. The other ranks are simulated: each has
drawn what this one has drawn, in another order, and the clock stands still while they pickle.
Prompts have 8 rollouts and a golden solution. Every point is a process of its own, of one thread.
CPU time is counted, because the machine may be shared. Not a test: nothing here asserts.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.step_work import resident_mib
from stable_opd_mcore.config.load import parse_config
from stable_opd_mcore.losses.objectives import build_objective
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.records import Prompt, Rollout, Sample, SampleFacts
from stable_opd_mcore.rollout.engine import RolloutEngine
from stable_opd_mcore.train import step
from stable_opd_mcore.train.persistence import rollout_writer
from stable_opd_mcore.train.samples import sharing

SAMPLES = 8  # rollouts of a prompt
STEPS = 3
PROMPT_TOKENS, GOLDEN_TOKENS, VOCABULARY = 300, 4000, 150_000
PHASES = ("samples", "facts", "share", "exchange", "pack", "metrics")
POINTS = [(128 * ranks, ranks) for ranks in (1, 2, 4, 8, 16, 32, 64)]
POINTS += [(count, 1) for count in (256, 1024, 4096, 8192)]


@dataclass
class Clock:
    """CPU seconds by phase, without those of `others`, and bytes that this rank receives."""

    seconds: dict[str, float] = field(default_factory=dict)
    received_bytes: int = 0
    _excluded: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, excluded = time.process_time(), self._excluded
        yield
        passed = time.process_time() - start - (self._excluded - excluded)
        self.seconds[name] = self.seconds.get(name, 0.0) + passed

    @contextmanager
    def others(self) -> Iterator[None]:
        """What other ranks do meanwhile."""
        start = time.process_time()
        yield
        self._excluded += time.process_time() - start


@dataclass(frozen=True)
class OtherRanks:
    """In place of torch.distributed's functions: the other ranks give what this one gives."""

    ranks: int
    clock: Clock

    def world_size(self, group: Any = None) -> int:
        return 1 if group == "replica" else self.ranks

    def gather(self, items: list[Any] | None, item: Any, **_: Any) -> None:
        assert items is not None
        blob = pickle.dumps(item)
        self.clock.received_bytes += len(blob) * (len(items) - 1)
        items[:] = [item, *(pickle.loads(blob) for _ in range(len(items) - 1))]
        if isinstance(item, np.ndarray):  # numbers of samples: each rank has another order
            with self.clock.others():
                golden = int(item[0].sum())
                orders = [order_on(rank, item.shape[1], golden) for rank in range(self.ranks)]
                items[:] = [item[:, order] for order in orders]

    def collect(
        self, world: Any, samples: Sequence[Sample], facts: SampleFacts, trainer_B: Any
    ) -> dict[int, Sample]:
        """As train.sharing.collect; what arrives from another rank is a copy of own samples."""
        with self.clock.phase("exchange"):
            num_golden = sum(sample.source == "golden" for sample in samples)
            drawn = np.flatnonzero(facts.holder_B == 0)
            for rank in range(1, self.ranks):
                leaving = drawn[trainer_B[drawn] == rank]
                pickle.dumps([samples[index] for index in facts.index_B[leaving].tolist()])
            mine = np.flatnonzero(trainer_B == 0)
            held: dict[int, Sample] = {}
            for rank in range(self.ranks):
                places = mine[facts.holder_B[mine] == rank]
                index = order_on(rank, len(samples), num_golden)[facts.index_B[places]]
                arriving = [samples[i] for i in index.tolist()]
                if rank:
                    with self.clock.others():
                        blob = pickle.dumps(arriving)
                    self.clock.received_bytes += len(blob)
                    arriving = pickle.loads(blob)
                held.update(zip(places.tolist(), arriving, strict=True))
        return held

    @contextmanager
    def replaced(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in (
                (dist, "get_world_size", self.world_size),
                (dist, "get_rank", lambda *_: 0),
                (dist, "all_gather_object", self.gather),
                (dist, "gather_object", self.gather),
                (dist, "group", SimpleNamespace(WORLD="world")),
                (sharing, "collect", self.collect),
            ):
                stack.enter_context(patch.object(owner, name, value))
            yield


def order_on(rank: int, count: int, golden: int) -> NDArray[np.int64]:
    """The order in which that rank has drawn this rank's samples; golden solutions stay last."""
    rollouts = count - golden
    return np.append(np.roll(np.arange(rollouts), 5 * rank), np.arange(rollouts, count))


def make_run(rollouts: int, ranks: int, tokens: int) -> Any:
    """What the measured functions read of train.run.Run."""
    config = parse_config(
        {
            "run": {"name": "host"},
            "student": {"path": "none"},
            "teacher": {"path": "none"},
            "data": {"train": {"path": "synthetic:arithmetic"}},
            "sampling": {"max_new_tokens": tokens},
            "rollout": {"prompts_per_step": rollouts // SAMPLES, "samples_per_prompt": SAMPLES},
            "kl": {"beta": 0.1},
            "mixture": {"lambda": 0.5},
            "train": {"micro_batch_tokens": 4 * tokens},
        },
        "benchmarks.host",
    )
    world = SimpleNamespace(
        rank=0,
        data_rank=0,
        data_size=ranks,
        batch_rank=0,
        batch_size=ranks,
        context_rank=0,
        context_size=1,
        token_multiple=1,
        sequence_multiple=1,
        microbatch_multiple=1,
        model_group="replica",
        data_group="world",
        device="cpu",
    )
    architecture = SimpleNamespace(attention_length=20_000.0, experts=None)
    return SimpleNamespace(
        config=config,
        world=world,
        objective=build_objective(config, (1,), (1,)),
        student=SimpleNamespace(chunks=[SimpleNamespace(architecture=architecture)]),
        engine=RolloutEngine(),
    )


def draw(rollouts: int, ranks: int, tokens: int) -> list[Rollout]:
    """Of rank 0: responses of 3/4 to all of the allowed tokens, and about 3 characters a token."""
    random = np.random.default_rng(0)
    letters = np.array(list("eeettaoinshrdlucmfwypvbgkjqxz"))
    words = ["".join(random.choice(letters, length)) for length in random.integers(2, 8, 3000)]

    def rollout(prompt: Prompt, index: int) -> Rollout:
        length = int(random.integers(3 * tokens // 4, tokens))
        return Rollout(
            prompt,
            index,
            random.integers(0, VOCABULARY, length, dtype=np.int32),
            -random.exponential(0.3, length).astype(np.float32),
            "stop",
            0,
            " ".join(words[i] for i in random.zipf(1.2, length // 2) % len(words)),
            float(random.integers(0, 2)),
        )

    def ids(length: int) -> tuple[int, ...]:
        return tuple(random.integers(0, VOCABULARY, length).tolist())

    prompts = [
        Prompt(f"train:{i}", "", ids(PROMPT_TOKENS), "1", ids(GOLDEN_TOKENS))
        for i in range(0, rollouts // SAMPLES, ranks)
    ]
    return [rollout(prompt, index) for prompt in prompts for index in range(SAMPLES)]


def measure(num_rollouts: int, ranks: int, tokens: int) -> dict[str, Any]:
    """One point, in this process: the third step, whose memory comes from the earlier ones."""
    torch.set_num_threads(1)
    run, rollouts = make_run(num_rollouts, ranks, tokens), draw(num_rollouts, ranks, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins here
    before, clock = resident_mib(peak=False), Clock()
    for _ in range(STEPS):
        clock = Clock()
        one_step(run, rollouts, OtherRanks(ranks, clock), clock)
    peak = resident_mib(peak=True) - before
    with (
        tempfile.TemporaryDirectory() as folder,
        OtherRanks(1, Clock()).replaced(),  # this rank's part of the file
        clock.phase("file"),
    ):
        rollout_writer.write_together(Path(folder) / "rollouts", rollouts, run.world)
    return {
        "seconds": clock.seconds,
        "received_mb": clock.received_bytes / 1e6,
        "peak_mib": peak,
    }


def one_step(run: Any, rollouts: list[Rollout], others: OtherRanks, clock: Clock) -> None:
    """The host work between the drawn rollouts and the next step."""
    prompts = [rollout.prompt for rollout in rollouts[::SAMPLES]]
    rows = range(run.config.rollout.prompts_per_step)
    with others.replaced():
        timer = PhaseTimer()
        with clock.phase("samples"):
            drawn = step.rollouts_as_samples(run, prompts, rollouts, 0)
            drawn += step.golden_solutions(run, prompts, 0)
        with clock.phase("facts"):
            facts = sharing.gather_facts(run.world, drawn, rows)
        with clock.phase("share"), nested(clock, "share", "exchange"):
            (minibatch,) = step.minibatches_of(run, drawn, facts)
        with clock.phase("pack"):
            step.pack_minibatch(run, minibatch)
        with clock.phase("metrics"):
            step.step_metrics(run, rollouts, facts, [], timer, trained_version=0)


@contextmanager
def nested(clock: Clock, outer: str, inner: str) -> Iterator[None]:
    """Count the inner phase's seconds there alone."""
    before = clock.seconds.get(inner, 0.0)
    yield
    clock.seconds[outer] = clock.seconds.get(outer, 0.0) - clock.seconds[inner] + before


def main() -> None:
    """Measure the points and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rollouts", type=int, help="of all ranks")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="of a response, at most")
    parser.add_argument("--json", action="store_true", help="one point, in this process")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options.rollouts, options.ranks, options.tokens)))
        return
    points = [(options.rollouts, options.ranks)] if options.rollouts else POINTS
    names = ("rollouts", "ranks", *PHASES, "sum", "s per 1,024", "MB in", "peak MiB", "file")
    print(f"CPU seconds of one rank, {options.tokens:,} tokens")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|", flush=True)
    for rollouts, ranks in points:
        command = [sys.executable, "-m", "benchmarks.host", "--json"]
        command += [f"--rollouts={rollouts}", f"--ranks={ranks}", f"--tokens={options.tokens}"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        seconds = found["seconds"]
        total = sum(seconds[name] for name in PHASES)
        numbers = [*(seconds[name] for name in PHASES), total, total * 1024 * ranks / rollouts]
        cells = [f"{rollouts:,}", str(ranks), *(f"{number:.3f}" for number in numbers)]
        cells += [f"{found['received_mb']:.1f}", f"{found['peak_mib']:.0f}"]
        print("| " + " | ".join([*cells, f"{seconds['file']:.2f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
