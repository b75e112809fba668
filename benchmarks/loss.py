"""Time and peak memory of the loss, forward and backward: ours, plain torch, Liger's fused-linear
JSD.

    python -m benchmarks.loss    # one point on a CPU; on CUDA the sweep over T with both heads
    python -m benchmarks.loss --tokens 8192 --hidden 3584 --vocab 152064 --dtype bf16
    python -m benchmarks.loss --json loss.json
    python -m benchmarks.loss --smoke   # a tiny size in this process: does it run?

Full-vocabulary reverse KL of a student to a frozen model, from hidden states and heads, with
gradients to the student's hidden states and head: the work of gkd. "ours, opd" is the surrogate on
sampled tokens with the exact KL to the reference: the same four products. "gemms" is only these
products, the floor. Every figure is from a process of its own. Memory is what forward and backward
add at their peak to the inputs, once with the two gradients and once without. Not a test: nothing
here asserts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stable_opd_mcore.losses.fused import fused_loss
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.token_losses import Terms, divergence_from_teacher, opd
from stable_opd_mcore.records import MicroBatch, Scores

CPU_POINT = (4096, 512, 32768)  # T, H, V
SMOKE_POINT = (100, 32, 300)
CUDA_HEADS = ((3584, 152064), (1536, 151936))
CUDA_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
MIB = 2**20


@dataclass(frozen=True)
class Point:
    """One measurement to make."""

    implementation: str
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    device: str
    block_rows: int
    repeats: int
    threads: int
    main_grad: bool = False  # "ours" adds the head's gradient to Megatron's buffer, as in training


@dataclass(frozen=True)
class Inputs:
    student_TH: Tensor
    student_VH: Tensor
    teacher_TH: Tensor
    teacher_VH: Tensor


Step = Callable[[Inputs], Tensor]


def ours(point: Point) -> Step:
    terms = Terms(policy=divergence_from_teacher, divergence="reverse")
    return fused(point, terms, pg_weight=1 / point.tokens)


def ours_opd(point: Point) -> Step:
    terms = Terms(policy=opd, reference="exact")
    return fused(point, terms, pg_weight=1 / point.tokens, kl_weight=1 / point.tokens)


def fused(point: Point, terms: Terms, pg_weight: float, kl_weight: float = 0.0) -> Step:
    """The package's loss; the frozen model is teacher and reference in one."""

    def step(x: Inputs) -> Tensor:
        index = torch.zeros(point.tokens, dtype=torch.int64, device=point.device)
        zero = torch.zeros(point.tokens, device=point.device)
        batch = MicroBatch(
            tokens_T=index,
            positions_T=index,
            cu_seqlens=index[:2].int(),
            max_seqlen=point.tokens,
            rows_N=index,
            targets_N=index,
            sample_index_N=index,
            token_index_N=index,
            turn_N=index,
            index_in_turn_N=index,
            golden_N=zero.bool(),
            pg_weight_N=torch.full_like(zero, pg_weight),
            kl_weight_N=torch.full_like(zero, kl_weight),
            sft_weight_N=zero,
            rollout_logprob_N=zero,
            repetitive_N=zero.bool(),
            truncated_N=zero.bool(),
            golden_rows_G=torch.zeros(0, dtype=torch.int64),
            teacher=Scores(logprob_N=zero, hidden_NH=x.teacher_TH),
            reference=Scores(None, hidden_NH=x.teacher_TH),
        )
        student, frozen = (Head(weight, 0, point.vocab) for weight in (x.student_VH, x.teacher_VH))
        return fused_loss(
            x.student_TH,
            student,
            batch,
            terms,
            teacher_head=frozen,
            reference_head=frozen,
            block_rows=point.block_rows,
        ).loss

    return step


def plain_torch(point: Point) -> Step:
    def step(x: Inputs) -> Tensor:
        log_p = (x.student_TH @ x.student_VH.T).float().log_softmax(-1)
        log_q = (x.teacher_TH @ x.teacher_VH.T).float().log_softmax(-1)
        kl = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
        return kl / point.tokens

    return step


def liger(point: Point) -> Step:
    from liger_kernel.transformers import LigerFusedLinearJSD  # pyright: ignore[reportMissingImports]

    loss = LigerFusedLinearJSD(jsd_beta=1.0)  # 1 is the reverse KL

    def step(x: Inputs) -> Tensor:
        return loss(x.student_TH, x.student_VH, x.teacher_TH, x.teacher_VH, None)

    return step


def gemms(point: Point) -> Step:
    """The four products of the other implementations, in the same blocks of rows, without passes
    over their results."""

    class Products(torch.autograd.Function):
        @staticmethod
        def forward(ctx, student_TH, student_VH, teacher_TH, teacher_VH):
            d_TH, d_VH = torch.zeros_like(student_TH), torch.zeros_like(student_VH)
            rows = min(point.block_rows, point.tokens)
            buffers = student_VH.new_empty(2, rows, point.vocab)
            for start in range(0, point.tokens, rows):
                block = slice(start, min(start + rows, point.tokens))
                logits, other = buffers[:, : block.stop - start]
                torch.mm(student_TH[block], student_VH.T, out=logits)
                torch.mm(teacher_TH[block], teacher_VH.T, out=other)
                d_TH[block] = logits @ student_VH
                d_VH.addmm_(logits.T, student_TH[block])
            ctx.save_for_backward(d_TH, d_VH)
            return student_TH.new_zeros(())

        @staticmethod
        def backward(ctx, *grad_outputs):
            return *ctx.saved_tensors, None, None

    return lambda x: Products.apply(x.student_TH, x.student_VH, x.teacher_TH, x.teacher_VH)


IMPLEMENTATIONS: dict[str, Callable[[Point], Step]] = {
    "ours": ours,
    "ours, opd": ours_opd,
    "plain torch": plain_torch,
    "liger": liger,
    "gemms": gemms,
}


def make_inputs(point: Point) -> Inputs:
    generator = torch.Generator(point.device).manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[point.dtype]

    def normal(*shape: int, scale: float) -> Tensor:
        x = torch.empty(*shape, dtype=dtype, device=point.device)
        return x.normal_(generator=generator).mul_(scale)

    student_TH, teacher_TH = (normal(point.tokens, point.hidden, scale=1.0) for _ in range(2))
    student_VH, teacher_VH = (
        normal(point.vocab, point.hidden, scale=point.hidden**-0.5) for _ in range(2)
    )
    return Inputs(student_TH.requires_grad_(), student_VH.requires_grad_(), teacher_TH, teacher_VH)


def measure(point: Point) -> dict[str, float]:
    """Seconds (median of repeats, after one warm-up) and MiB of one point, in this process."""
    torch.set_num_threads(point.threads)
    inputs = make_inputs(point)
    summed = [inputs.student_TH, inputs.student_VH]
    if point.main_grad:
        head: Any = summed.pop()
        head.main_grad = torch.zeros_like(head, dtype=torch.float32)
    step = IMPLEMENTATIONS[point.implementation](point)
    held = memory(point, reset=True)
    seconds = []
    for _ in range(point.repeats + 1):
        inputs.student_TH.grad = inputs.student_VH.grad = None
        synchronize(point)
        start = time.perf_counter()
        loss = step(inputs)
        loss.backward()
        synchronize(point)
        seconds.append(time.perf_counter() - start)
    extra = memory(point, reset=False) - held
    gradients = sum(x.numel() * x.element_size() for x in summed)
    timed = sorted(seconds[1:])
    return {
        "seconds": timed[len(timed) // 2],
        "peak_mib": extra / MIB,
        "peak_without_gradients_mib": (extra - gradients) / MIB,
        "loss": float(loss.detach()),
    }


def memory(point: Point, reset: bool) -> int:
    """Bytes in use now (reset: the peak starts again), else the peak since."""
    if point.device == "cuda":
        if not reset:
            return torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    field = "VmRSS:" if reset else "VmHWM:"
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) * 1024


def synchronize(point: Point) -> None:
    if point.device == "cuda":
        torch.cuda.synchronize()


def points(options: argparse.Namespace) -> list[Point]:
    """What to measure: the sizes asked for, or the device's own."""
    device = options.device
    if options.smoke:
        sizes = [SMOKE_POINT]
    elif options.tokens:
        sizes = [(options.tokens, options.hidden, options.vocab)]
    elif device == "cuda":
        sizes = [(tokens, *head) for head in CUDA_HEADS for tokens in CUDA_TOKENS]
    else:
        sizes = [CPU_POINT]
    names = [n for n in IMPLEMENTATIONS if n != "liger" or device == "cuda"]
    dtype = options.dtype or ("bf16" if device == "cuda" else "fp32")
    block_rows = options.block_rows or (1024 if device == "cuda" else 512)
    repeats = options.repeats or (5 if device == "cuda" else 3)
    return [
        Point(name, *size, dtype, device, block_rows, repeats, options.threads)
        for size in sizes
        for name in options.only or names
    ]


def in_own_process(point: Point) -> dict[str, float | str]:
    """Measure in a fresh process; a failure (out of memory, not installed) is its last line."""
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.loss", "--measure", json.dumps(asdict(point))],
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        lines = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
        return {"failed": lines[-1]}
    return json.loads(finished.stdout)


def print_table(rows: list[dict], device: str) -> None:
    """One row per measurement; "x gemms" is its time over that of the products of its size."""
    floor = {size_of(row): row.get("seconds") for row in rows if row["implementation"] == "gemms"}
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    table = Table(title=f"{name or platform.machine()}, {date.today()}, {versions()}")
    columns = ("T", "H", "V", "dtype", "", "seconds", "x gemms", "peak MiB", "without gradients")
    for column in (*columns, "loss"):
        table.add_column(column, justify="left" if column == "" else "right")
    for row in rows:
        sizes = [f"{row[key]:,}" for key in ("tokens", "hidden", "vocab")]
        if "failed" in row:
            figures = [row["failed"][:60], "", "", "", ""]
        else:
            products = floor.get(size_of(row))
            figures = [
                f"{row['seconds']:.4f}",
                f"{row['seconds'] / products:.2f}" if products else "",
                f"{row['peak_mib']:,.0f}",
                f"{row['peak_without_gradients_mib']:,.0f}",
                f"{row['loss']:.5f}",
            ]
        table.add_row(*sizes, row["dtype"], row["implementation"], *figures)
    Console(width=160).print(table)


def size_of(row: dict) -> tuple:
    return row["tokens"], row["hidden"], row["vocab"], row["dtype"]


def versions() -> str:
    """The installed versions of what is measured."""
    found = []
    for package in ("torch", "triton", "liger-kernel"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--tokens", type=int, help="T; without it the device's own sizes")
    parser.add_argument("--hidden", type=int, default=CPU_POINT[1])
    parser.add_argument("--vocab", type=int, default=CPU_POINT[2])
    parser.add_argument("--dtype", choices=("fp32", "bf16"))
    parser.add_argument("--only", nargs="+", choices=list(IMPLEMENTATIONS))
    parser.add_argument("--block-rows", type=int, help="default 1024, on a CPU 512")
    parser.add_argument("--repeats", type=int, help="timed runs after one warm-up")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--smoke", action="store_true", help="a tiny size, in this process")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Point(**json.loads(options.measure)))))
        return
    measured = measure if options.smoke else in_own_process
    with Console(stderr=True).status("measuring"):
        rows = [asdict(point) | measured(point) for point in points(options)]
    print_table(rows, options.device)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
