"""Rewrite megatron-core while it is imported, so that it runs in a process without CUDA.

Only `megatron.*` is rewritten, and only the expressions that raise without CUDA: `torch.cuda.x`
becomes a facade whose device is the CPU, `"cuda"` constants become `"cpu"`, `tensor.cuda()` becomes
`tensor.cpu()`, and imports of Transformer Engine and apex fail. No attribute of torch changes.
Streams, NCCL, CUDA graphs and fused kernels do not run. Valid for megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stable_opd_mcore.parallel import cpu_adam, cuda_facade

_FACADE = "_cpu_cuda"  # the name of the facade in the rewritten modules
# A cluster's environment has them on its login nodes too, where their functions fail when called.
_CUDA_PACKAGES = {"transformer_engine", "transformer_engine_torch", "apex", "amp_C"}


@cache
def is_needed() -> bool:
    """Whether Megatron runs on the CPU in this process. The first call prepares for that."""
    if torch.cuda.is_available():
        return False
    sys.modules[f"{_FACADE}_nvtx"] = cuda_facade.nvtx_module(f"{_FACADE}_nvtx")
    for message in _HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    return True


def find_spec(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Where to find a module of Megatron, with a loader that rewrites its source."""
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
    return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the rewritten source, and keeps its bytecode in this package's `__pycache__`.

    The folder's name has this file's digest, so no other version of the hook reads it.
    """

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:
        tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_data(self, path: str) -> bytes:
        return super().get_data(_own_bytecode(path))

    def set_data(self, path: str, data: bytes, *, _mode: int = 0o666) -> None:
        super().set_data(_own_bytecode(path), data, _mode=_mode)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _FACADE, cuda_facade.FACADE)
        super().exec_module(module)
        adjust = _AFTER_IMPORT.get(module.__name__)
        if adjust is not None:
            adjust(module)


def _own_bytecode(path: str) -> str:
    if not str(path).endswith(".pyc"):
        return path
    return str(_BYTECODE / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.pyc")


_TRITON_IS_MISSING = importlib.util.find_spec("triton") is None
_HOOK_DIGEST = hashlib.sha256(
    Path(__file__).read_bytes() + bytes([_TRITON_IS_MISSING])  # all that the bytecode depends on
).hexdigest()[:16]
_BYTECODE = Path(importlib.util.cache_from_source(__file__)).parent / f"megatron-{_HOOK_DIGEST}"


class _Rewrite(ast.NodeTransformer):
    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        node.body = [_without_triton(statement) for statement in node.body]
        return node

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        return _refused(node) if _needs_cuda(node.names[0].name) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.module == "torch.cuda.nvtx":
            node.module = f"{_FACADE}_nvtx"
        return _refused(node) if node.module and _needs_cuda(node.module) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "cuda" and _is_torch(node.value):
            return ast.copy_location(ast.Name(_FACADE, node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "cuda":
                node.func.attr, node.args, node.keywords = "cpu", [], []
            elif _is_torch(node.func.value):
                node.keywords = [item for item in node.keywords if item.arg != "pin_memory"]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        value = {"cuda": "cpu", "cuda:": ""}.get(node.value, node.value)
        if value.startswith("torch.cuda.") and value.endswith("Tensor"):
            # The optimizer compares param.type() strings.
            value = value.replace("torch.cuda.", "torch.")
        return ast.copy_location(ast.Constant(value), node)


def _needs_cuda(module: str) -> bool:
    return module.partition(".")[0] in _CUDA_PACKAGES


def _refused(statement: ast.stmt) -> ast.stmt:
    # Megatron catches the error and takes torch's functions, as where they are not installed.
    text = "raise ModuleNotFoundError('a CUDA package, and this machine has no CUDA')"
    return ast.copy_location(ast.parse(text).body[0], statement)


def _without_triton(statement: ast.stmt) -> ast.stmt:
    # From 0.18 on, gpt_model imports mixture-of-experts modules that import triton. Imports inside
    # a `try` stay: Megatron handles their ImportError.
    if not isinstance(statement, ast.Import) or not _TRITON_IS_MISSING:
        return statement
    module = statement.names[0]
    if module.name.partition(".")[0] != "triton":
        return statement
    stub = ast.parse(f"{module.asname or 'triton'} = {_FACADE}.triton_stub").body[0]
    return ast.copy_location(stub, statement)


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _disable_compilation(module: Any) -> None:
    module.disable_jit_fuser()  # torch.compile of three-line functions costs seconds each on a CPU


def _use_default_generator(module: Any) -> None:
    generator = torch.default_generator
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: (
        generator.get_state()
    )
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: generator.set_state(
        state
    )
    # The tracker warns when the CPU generator moves in its CUDA context: here they are the same.
    module.logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _use_cpu_adam(module: Any) -> None:
    # Without a fused Adam, Megatron takes torch.optim.AdamW, which keeps `step` per parameter: a
    # distributed-optimizer checkpoint written with it cannot be loaded. The branch of the fused
    # optimizers writes the same checkpoint layout as on a GPU.
    module.Adam = cpu_adam.FusedAdam
    module.HAVE_APEX_OR_TE = module.USING_APEX_OPTIMIZER = True
    module.USING_PYTORCH_OPTIMIZER = False


def _skip_collectives_of_one_rank(module: Any) -> None:
    # A distributed optimizer over one rank gathers and scatters weights and gradients in place:
    # NCCL then does nothing, gloo copies them.
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(module, name, partial(_collective_or_nothing, getattr(module, name)))


def _collective_or_nothing(
    collective: Callable, output: Tensor, input: Tensor, *, group: ProcessGroup, **options: Any
) -> Any:
    if group.size() > 1:
        return collective(output, input, group=group, **options)
    assert output.data_ptr() == input.data_ptr(), "Megatron passes views of one buffer"
    return None


def _adjust_experts(module: Any) -> None:
    # The router asks whether this name is None, which Megatron defines only where Transformer
    # Engine can be imported.
    vars(module).setdefault("te_general_gemm", None)
    # Megatron copies the sizes of an all-to-all from the GPU, and only then makes arrays of them,
    # which the all-to-all needs.
    module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _disable_compilation,
    "megatron.core.tensor_parallel.random": _use_default_generator,
    "megatron.core.distributed.param_and_grad_buffer": _skip_collectives_of_one_rank,
    "megatron.core.transformer.moe.moe_utils": _adjust_experts,
    "megatron.core.optimizer": _use_cpu_adam,
    "megatron.core.optimizer.distrib_optimizer": _use_cpu_adam,
}


# Megatron's warnings about GPU packages and settings, and torch's about Megatron's calls.
_HARMLESS_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "If you are using transformer_engine as the transformer implementation",
    "When using async grad allreduce it is recommended to set the environment variable CUDA",
    "`torch.distributed.[a-z_]+` is deprecated",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)
