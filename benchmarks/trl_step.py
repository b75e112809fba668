"""Steps of TRL's DistillationTrainer, timed by phase; step.py starts it with TRL's own python.

TRL's code is unchanged: the trainer is subclassed to read the clock, and a logits processor fixes
the lengths of the responses. Settings are the fastest for TRL on this work: no gradient
checkpointing (its default), no logging, no saving. Not a command of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import DistillationConfig, DistillationTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.step_work import Steps, Work, force_stops, resident_mib

ROWS, ACCUMULATION = 8, 4  # micro-batches of 8 rows, 4 a step


class Stopwatch:
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


class Script(LogitsProcessor):
    """Stops row i of the batch at lengths[i]."""

    def __init__(self, lengths: tuple[int, ...], num_prompt_tokens: int) -> None:
        self.lengths = lengths
        self.num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self.num_prompt_tokens
        return force_stops(scores, [length == position + 1 for length in self.lengths])


class TimedTrainer(DistillationTrainer):
    """Rollout: until the batch of responses is there. Score: the teacher's hidden states."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.watch = Stopwatch()
        self.response_tokens = 0
        self.loss_sum = 0.0

    def _generate_and_score_completions(self, inputs):
        with self.watch.phase("rollout"):
            batch = super()._generate_and_score_completions(inputs)
        self.response_tokens = int(batch["completion_mask"].sum())
        return batch

    def _get_last_hidden_state(self, unwrapped_model, *args, **kwargs):
        if unwrapped_model is not self.accelerator.unwrap_model(self.teacher_model):
            return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)
        with self.watch.phase("score"):
            return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.loss_sum += float(loss)
        return loss


class Record(TrainerCallback):
    """Records every measured step at its end."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.trainer: TimedTrainer | None = None
        self.steps = Steps()
        self.start = self.cpu_start = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.steps.started_mib = resident_mib(peak=False)
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        assert self.trainer is not None
        now, seconds = time.perf_counter(), self.trainer.watch.take()
        if state.global_step > self.warmup_steps:
            self.steps.add(
                seconds["rollout"],
                seconds["score"],
                now - self.start,
                time.process_time() - self.cpu_start,
                self.trainer.response_tokens,
                self.trainer.loss_sum,
            )
        self.trainer.loss_sum = 0.0
        self.start, self.cpu_start = time.perf_counter(), time.process_time()


def measure(work: Work) -> Steps:
    torch.set_num_threads(work.threads)
    home = Path(work.directory)
    assert len(work.lengths) == ROWS * ACCUMULATION
    rows = [json.loads(line) for line in (home / "prompts.jsonl").read_text().splitlines()]
    record = Record(work.warmup_steps)
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(home / "student", dtype=torch.float32),
        teacher_model=AutoModelForCausalLM.from_pretrained(home / "teacher", dtype=torch.float32),
        args=DistillationConfig(
            output_dir=str(home / "trl"),
            max_steps=work.steps,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=ACCUMULATION,
            max_completion_length=work.budget,
            beta=1.0,  # reverse KL over the full vocabulary
            temperature=1.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            eval_strategy="no",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["problem"]} for row in rows]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            home / "student", padding_side="left"
        ),
        callbacks=[record],
    )
    record.trainer = trainer
    script = Script(work.lengths, num_prompt_tokens=len(rows[0]["problem"].split()))
    trainer.model.generate = partial(
        trainer.model.generate, logits_processor=LogitsProcessorList([script])
    )
    trainer.train()
    record.steps.peak_mib = resident_mib(peak=True)
    return record.steps


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    steps = measure(Work(**given | {"lengths": tuple(given["lengths"])}))
    Path(sys.argv[2]).write_text(json.dumps(asdict(steps)))
