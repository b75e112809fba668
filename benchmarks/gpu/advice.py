"""What a part that failed means for training, where to look, and the suite's verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.suite import PARTS, PartResult

FAILED = ("failed", "out of time")


@dataclass(frozen=True)
class Advice:
    look: str  # next to the part's log
    means: str  # for training


ADVICE = {
    "environment": Advice(
        "`nvidia-smi`, and the versions of docs/cluster.md §1",
        "no other part can be trusted: a run would not start, or would start on CPUs",
    ),
    "attention": Advice(
        "the row `backend`: `unfused` asks for flash-attn or another cuDNN; with large errors "
        "compare under NVTE_FUSED_ATTN=0",
        "long responses train slowly, run out of memory, or have wrong gradients",
    ),
    "kernels": Advice(
        "the objectives that the log names; TRITON_INTERPRET=1 says whether the compiler is at "
        "fault",
        "do not train with an objective that is named; the others are not affected",
    ),
    "layers": Advice(
        "`Transformer Engine, bf16` next to `torch, bf16`: large in both is the GPU or cuBLAS, "
        "large in the first only is Transformer Engine; two libcudnn in one process do that",
        "every gradient of a run would be wrong: do not train",
    ),
    "step": Advice(
        "the first row above its limit: logits point at the layers, metrics at the loss, only the "
        "update at the optimizer",
        "the step computes other numbers than on a CPU: do not train",
    ),
    "publish": Advice(
        "PYTORCH_CUDA_ALLOC_CONF (expandable segments break CUDA IPC), ptrace limits of a "
        "container; for NCCL, NCCL_DEBUG=INFO",
        "servers would sample from other weights than the student's, or from none",
    ),
    "servers": Advice(
        "sglang/*.log and sglang/events.jsonl under servers/ in the suite's folder",
        "no rollouts from SGLang; rollout.engine=embedded trains without it, slowly",
    ),
    "memory": Advice(
        "the row `planned over measured memory`",
        "`stable-opd plan` errs by as much on this GPU: leave room",
    ),
    "utilisation": Advice(
        "out of memory: the plan; slow: the rates of `environment` next to the vendor's",
        "training is right, and slower than planned",
    ),
    "resume": Advice(
        "the first metric that differs",
        "a job that was stopped does not continue exactly: keep runs in one job",
    ),
    "loss": Advice(
        "the rows next to torch's and Liger's",
        "training is right, and the loss is slower than planned",
    ),
    "fp8": Advice(
        "the recipe that is named",
        "leave fp8.student, fp8.teacher and fp8.reference off; bf16 is not affected",
    ),
}


def lines_of(result: PartResult) -> list[str]:
    """What is printed for one part: its status, what it wants noticed, and advice if it failed."""
    gates = next(part.gates for part in PARTS if part.name == result.name)
    kind = "gates" if gates else "informs"
    first = f"{result.name:<12} {kind:<8} {result.status:<12} {result.seconds:5.0f} s  "
    lines = [(first + result.reason).rstrip()]
    lines += [f"  note: {e.name}: {e.note}" for e in result.entries if e.kind == "notice"]
    if result.status in FAILED:
        advice = ADVICE[result.name]
        lines += [f"  look at: {result.name}.log; {advice.look}", f"  it means: {advice.means}"]
    if result.status == "out of time":
        lines.append("  with caches that are filled now it may pass: run it again")
    return lines


def verdict(results: Sequence[PartResult]) -> tuple[str, bool]:
    """Whether training may start, in a sentence; and whether no part that gates has failed."""
    found = {result.name: result.status for result in results}
    gates = [part.name for part in PARTS if part.gates]
    failed = [name for name in gates if found.get(name) in FAILED]
    untested = [name for name in gates if found.get(name, "skipped") == "skipped"]
    if failed:
        return f"Do not train yet: {', '.join(failed)} failed.", False
    if untested:
        return f"Nothing that gates failed; not tested: {', '.join(untested)}.", True
    return f"Training may start: {', '.join(gates)} passed.", True
