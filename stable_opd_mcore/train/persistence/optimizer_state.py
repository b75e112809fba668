"""Save and load the distributed optimizer's state without gathering it.

A data-parallel rank holds a flat range of each parameter's fp32 weight and moments. Megatron's form
that any layout reads first gathers the ranges of all ranks in every rank's memory, 23 GB a rank for
a 7B model at TP4. A flat range of a row-major tensor is a few boxes: each rank saves and loads
its own, in place. The files hold the names and shapes of that form, so either reads the other.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size in each dimension
_PARAM_STATE = "param_state"


def sharded_state(optimizer: Any, weights: dict[str, Any], *, loading: bool) -> dict[Any, Any]:
    """The optimizer's state on this rank, as `dist_checkpointing` saves it or loads into it.

    Args:
        optimizer: what `get_megatron_optimizer` returns: one, or a second for the experts.
        weights: the sharded weights, as `weights_of` gives them.
        loading: allocate what is not there yet.
    """
    parts = _parts(optimizer)
    by_parameter = {id(item.data): item for item in nested_values(weights)}
    states = [_state_of(part, by_parameter, loading=loading) for part in parts]
    return states[0] if len(states) == 1 else dict(enumerate(states))  # Megatron's form


def set_state(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Take over what was loaded into `sharded_state`: a box was filled in place."""
    parts = _parts(optimizer)
    states = [loaded] if len(parts) == 1 else [loaded[index] for index in range(len(parts))]
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict({key: value for key, value in state.items() if key != _PARAM_STATE})


def boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Cut the elements [begin, end) of a row-major tensor into boxes, in their order.

    At most 2·dimensions - 1 boxes.
    """
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = prod(shape[1:])
    first, last = -(-begin // row), end // row  # the whole rows are [first, last)
    if first > last:  # all of it is inside one row
        yield from _in_row(shape, last, begin - last * row, end - last * row)
        return
    yield from _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], begin, end):
        yield (row, *offsets), (1, *sizes)


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _state_of(
    part: DistributedOptimizer,
    by_parameter: dict[int, ShardedTensor | ShardedTensorFactory],
    *,
    loading: bool,
) -> dict[str, Any]:
    if loading:
        part.load_state_dict(part.state_dict())  # allocates Adam's moments
    state = part.state_dict()
    state[_PARAM_STATE] = {
        str(index): _boxes_of(by_parameter[id(parameter)], tensors, begin, end)
        for index, (parameter, tensors, begin, end) in enumerate(_own_ranges(part))
    }
    return state


def _own_ranges(
    optimizer: DistributedOptimizer,
) -> Iterator[tuple[Tensor, dict[str, Tensor], int, int]]:
    """Each parameter with a part on this rank: its state by name, flat, and the part's range."""
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    state = optimizer._get_main_param_and_optimizer_states(parameter)
                    tensors = {name: value for name, value in state.items() if name != "step"}
                    yield parameter, tensors, ranges["param"].start, ranges["param"].end


def _boxes_of(
    base: ShardedTensor | ShardedTensorFactory, tensors: dict[str, Tensor], begin: int, end: int
) -> dict[str, list[ShardedTensor]]:
    """The boxes of the flat range [begin, end) of a parameter, for each of its states."""
    whole = [base] if isinstance(base, ShardedTensor) else list(nested_values(base.build()))
    found: dict[str, list[ShardedTensor]] = {name: [] for name in tensors}
    start = 0  # where `part` begins; gate and up, for example, are saved as two tensors
    assert base.data is not None
    for part in whole:
        assert part.data is not None
        assert part.data.is_contiguous()
        assert part.data.data_ptr() == base.data.data_ptr() + start * part.data.itemsize
        position = max(begin, start)
        for offsets, sizes in boxes(
            tuple(part.local_shape), position - start, min(end - start, part.data.numel())
        ):
            own = slice(position - begin, position - begin + prod(sizes))
            for name, flat in tensors.items():
                found[name].append(_box(part, name, flat.detach().view(-1)[own], offsets, sizes))
            position += prod(sizes)
        start += part.data.numel()
    assert start == base.data.numel()
    return found


def _box(
    part: ShardedTensor, name: str, flat: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> ShardedTensor:
    assert isinstance(part.replica_id, tuple)
    # A box has all dimensions of the full tensor: Megatron cannot prepend some to an uneven grid.
    prepended = part.prepend_axis_num
    size = (1,) * prepended + sizes
    inside = (0,) * prepended + offsets
    return ShardedTensor(
        key=f"optimizer.state.{name}.{part.key}",
        data=flat.view(size),
        dtype=flat.dtype,
        local_shape=size,
        global_shape=part.global_shape,
        global_offset=tuple(a + b for a, b in zip(part.global_offset, inside, strict=True)),
        axis_fragmentations=None,  # no even grid
        replica_id=(*part.replica_id[:2], 0),  # the last is the data-parallel rank
        allow_shape_mismatch=part.allow_shape_mismatch,
    )
