"""Compile the Triton kernels for an H200, without a GPU, at the sizes of a 7B model's head.

This finds mismatched types and launch arguments, loads that are split into single elements, and
kernels of which too few run at once; the interpreter finds none of these. A separate program, as
check_kernels.py is. Results are not checked.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stable_opd_mcore.losses import triton_ops
from stable_opd_mcore.losses.torch_ops import ShardSums

H200 = GPUTarget("cuda", 90, 32)
COLUMNS = 152064
OPTIONS = {
    triton_ops._sums_kernel: {
        "COLUMNS": COLUMNS,
        "HAS_OTHER": True,
        "WIDTH": len(ShardSums._fields),
        "TILE": triton_ops.SUMS_COLUMNS,
    },
    triton_ops._jsd_kernel: {"COLUMNS": COLUMNS, "TILE": triton_ops.TILE_COLUMNS},
    triton_ops._gradient_kernel: {
        "FIRST": "reverse",
        "SECOND": "jsd",
        "WIDTH": 11,
        "NUM_SPARSE": 3,
        "TILE": triton_ops.TILE_COLUMNS,
    },
}
REGISTERS = 65536  # one multiprocessor's
LOGITS = ("z_ptr", "o_ptr", "first_ptr", "second_ptr")


def argument_type(name: str) -> str:
    """Triton's name for the type of a kernel's argument."""
    if name in LOGITS:
        return "*bf16"
    if name == "columns_ptr":
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32"
    return "i32" if name.endswith("_stride") else "fp32"


def compile_for_h200(kernel: Any, options: dict[str, Any]) -> str:
    """The kernel's PTX, with pointers and strides that are multiples of 16 as in the trainer."""
    names = kernel.arg_names
    constants = {**options, "READABLE": COLUMNS, "DTYPE": tl.float32}
    constants = {names.index(name): value for name, value in constants.items() if name in names}
    signature = {
        name: "constexpr" if index in constants else argument_type(name)
        for index, name in enumerate(names)
    }
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (index,): aligned for index, name in enumerate(names) if name.endswith(("_ptr", "_stride"))
    }
    source = ASTSource(
        kernel, signature, {(index,): value for index, value in constants.items()}, attributes
    )
    return triton.compile(source, H200, {"num_warps": triton_ops.NUM_WARPS}).asm["ptx"]


def programs_at_once(ptx: str) -> int:
    """Programs of a kernel that the registers of one multiprocessor hold, by ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        report = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", source, "-o", binary],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    found = re.search(r"Used (\d+) registers", report)
    assert found is not None, report
    per_thread = -(-int(found[1]) // 8) * 8
    return REGISTERS // (per_thread * 32 * triton_ops.NUM_WARPS)


def main() -> None:
    for kernel, options in OPTIONS.items():
        ptx = compile_for_h200(kernel, options)
        assert re.search(r"ld\.global\S*\.v[24]\.b32", ptx), f"{kernel.__name__}: no wide loads"
        assert programs_at_once(ptx) >= 4, f"{kernel.__name__}: too many registers"
        assert not re.search(r"ld\.global\S*\.b16", ptx), f"{kernel.__name__}: narrow loads"
    print(f"{len(OPTIONS)} kernels for sm_90")


if __name__ == "__main__":
    main()
