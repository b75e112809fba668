"""A replacement for the sgl_kernel package, which has no CPU wheel: its functions in plain torch.

All but the first are for a draft that proposes a chain of tokens (sglang_cpu/drafts.py). SGLang's
CPU engine imports other names too; they raise NotImplementedError when called.

Letters: B requests, N tokens of a chain, of which the first is the student's own.
"""

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+plain.torch"


def assign_req_to_token_pool_cpu(
    request_rows: torch.Tensor,
    token_slots: torch.Tensor,  # [requests, positions]: cache slot of each token
    starts: torch.Tensor,
    ends: torch.Tensor,
    new_slots: torch.Tensor,  # the slots of all requests, concatenated
    pool_length: int,
) -> None:
    """Write each request's new slots into its row, from its start to its end."""
    taken = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        token_slots[row, start:end] = new_slots[taken : taken + count].to(token_slots.dtype)
        taken += count


def assign_draft_cache_locs_contiguous_cpu(
    request_rows: torch.Tensor,
    token_slots: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    pool_length: int,
    top_k: int,
    steps: int,
) -> None:
    """Copy the slots of the `top_k * steps` positions after each request's tokens."""
    ends = lengths + top_k * steps
    assign_extend_cache_locs_cpu(request_rows, token_slots, lengths, ends, slots, pool_length)


def assign_extend_cache_locs_cpu(
    request_rows: torch.Tensor,
    token_slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    pool_length: int,
) -> None:
    """Copy the slots of each request's positions from its start to its end."""
    places = zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    found = torch.cat([token_slots[row, start:end] for row, start, end in places])
    slots[: len(found)] = found.to(slots.dtype)


def fill_accept_out_cache_loc_cpu(
    accepted: torch.Tensor, slots: torch.Tensor, accepted_slots: torch.Tensor
) -> None:
    """Copy the slots of the accepted tokens, whose places are not -1."""
    places = accepted.flatten()
    found = slots[places[places >= 0].long()]
    accepted_slots[: len(found)] = found


def fill_bonus_tokens_cpu(
    tokens_BN: torch.Tensor, lengths_B: torch.Tensor, last_B: torch.Tensor, width: int
) -> None:
    """Copy each request's last token: the student's own, after those that it accepted."""
    last_B[:] = tokens_BN.view(-1, width).gather(1, lengths_B[:, None].long() - 1)[:, 0]


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Copy keys and values between slots of each buffer, of `strides` bytes a slot."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(pointer + target * stride, pointer + source * stride, stride)


def build_tree_kernel_efficient_cpu(
    parents: object,
    selected: object,
    lengths_B: torch.Tensor,
    mask: object,
    positions: torch.Tensor,  # [B * N]
    index_BN: torch.Tensor,
    next_BN: torch.Tensor,
    sibling_BN: torch.Tensor,
    top_k: int,
    steps: int,
    num_tokens: int,
    mask_mode: int,
) -> None:
    """Describe chains: each token's place in the batch, its position, and the place after it."""
    if top_k != 1:
        raise NotImplementedError("a tree of proposed tokens has no plain torch version")
    places_N = torch.arange(num_tokens)
    index_BN[:] = torch.arange(index_BN.numel()).view_as(index_BN)
    positions[:] = (lengths_B[:, None] + places_N).flatten()
    next_BN[:] = torch.where(places_N + 1 < num_tokens, places_N + 1, -1)
    sibling_BN.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,  # [B * N]
    accept_index: torch.Tensor,  # [B, N], places of accepted tokens; -1 elsewhere
    accept_token_num: torch.Tensor,  # [B]
    candidates: torch.Tensor,  # [B, N]
    target_predict: torch.Tensor,  # [B, N], the student's token after each
    retrive_index: torch.Tensor,  # SGLang's spelling
    **unused: object,
) -> None:
    """Accept the chain's tokens as long as they are the student's own; then comes the student's."""
    for each, (proposed, own, places) in enumerate(
        zip(candidates.tolist(), target_predict.tolist(), retrive_index.tolist(), strict=True)
    ):
        number = 0
        while number + 1 < len(proposed) and proposed[number + 1] == own[number]:
            number += 1
        for place in range(number + 1):
            predicts[places[place]] = own[place]
            accept_index[each, place] = places[place]
        accept_token_num[each] = number


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no plain torch version")

    return missing
