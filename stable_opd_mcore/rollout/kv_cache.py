"""Keys and values of the rows being decoded, attention over them, and states of gated delta nets.

Rows share one cell axis: prompts are padded on the left, so every row writes its next token into
the same cell, and an additive mask hides a row's padding. Keys are stored rotated to the row's own
position (padding does not count), so a row's numbers do not depend on the other rows' lengths, and
no key is rotated twice. The capacity grows by half when it is full. Dropping finished rows also
drops cells that are padding for all remaining rows.

Letters: B rows, T new tokens per row, S cells, G key-value groups with R query heads each, D head
size, P positions, E = 2 D numbers of a rotation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stable_opd_mcore.models.layers.attention_sinks import attend_with_sinks
from stable_opd_mcore.models.layers.gated_delta_net import DeltaNetState
from stable_opd_mcore.models.layers.rotary import rotate, rotations

_CELL_BLOCK = 128  # cells are allocated in multiples of this


class KVCache:
    """Cached keys and values of one batch.

    Args:
        angles: rotary angles of each kind of layer, fp32 [positions, D/2].
    """

    def __init__(self, prompt_lengths: list[int], angles: Sequence[Tensor], dtype: torch.dtype):
        longest = max(prompt_lengths)
        device = angles[0].device
        self.used = 0  # cells filled so far
        self.pad_B = longest - torch.tensor(prompt_lengths, dtype=torch.int64, device=device)
        self._rotations = [rotations(angles_PD, dtype) for angles_PD in angles]
        self._dtype = dtype
        # By number of a layer of latents: `LatentAttention.key_value_weights` of this batch's model
        self.latent_weights: dict[int, Tensor] = {}
        # keys and values of each layer, [B, G, capacity, D]; of a layer of latents, its keys twice
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, DeltaNetState] = {}  # by number of a layer with a gated delta net
        self._capacity = 0
        self._padded = min(prompt_lengths) != longest

    def begin(self, num_tokens: int) -> None:
        """Prepare to run `num_tokens` more tokens per row: `attend` once per layer, then `end`."""
        stop = self.used + num_tokens
        self._reserve(stop)
        cells_T = torch.arange(self.used, stop, device=self.pad_B.device)
        positions_TB = (cells_T[:, None] - self.pad_B[None]).clamp_(min=0)
        self._rotations_now = [each[positions_TB][:, :, None, None] for each in self._rotations]
        self._bias_B1TS = self._bias(cells_T, stop)
        self._stop = stop
        self._is_padding_TB = cells_T[:, None] < self.pad_B if self._padded else None

    def end(self) -> None:
        self.used = self._stop

    def without_padding(self, x_TBX: Tensor) -> Tensor:
        """The new tokens' numbers, 0 where a token is padding."""
        if self._is_padding_TB is None:
            return x_TBX
        return x_TBX.masked_fill(self._is_padding_TB.unsqueeze(-1), 0.0)

    def attend(
        self,
        layer: int,
        queries_and_key: Tensor,
        value_TBGD: Tensor | None,
        scale: float | None,
        *,
        rotary: int = 0,
        sinks: Tensor | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Rotate, store, and attend to what is stored; returns [T, B, G R D].

        Args:
            queries_and_key: [T, B, G, R + 1, D]: a group's key comes after its queries.
            value_TBGD: None: the values are the elements of the keys that are not rotated.
            scale: what scores are multiplied by; None: 1/sqrt(D).
            rotary: which of the rotary angles are the layer's.
            sinks, window: the layer's (models/layers/attention_sinks.py).
        """
        T, B, G, heads, D = queries_and_key.shape
        R = heads - 1
        rotation = self._rotations_now[rotary]
        if layer not in self._layers:
            stored = queries_and_key.new_empty(B, G, self._capacity, D)
            own = stored if value_TBGD is None else torch.empty_like(stored)
            self._layers[layer] = (stored, own)
        keys, values = self._layers[layer]
        rotated_BGHTD = rotate(queries_and_key, rotation).permute(1, 2, 3, 0, 4)
        keys[:, :, self.used : self._stop] = rotated_BGHTD[:, :, R]
        if value_TBGD is None:
            values = keys[..., rotation.shape[-1] // 2 :]
        else:
            values[:, :, self.used : self._stop] = value_TBGD.permute(1, 2, 0, 3)
        if sinks is not None or window is not None:
            first, bias = self._in_window(window)
            out = attend_with_sinks(
                rotated_BGHTD[:, :, :R].flatten(1, 2),
                keys[:, :, first : self._stop],
                values[:, :, first : self._stop],
                sinks,
                bias=bias,
                scale=scale,
            )
            return out.permute(2, 0, 1, 3).flatten(2)
        bias = self._bias_B1TS
        if bias is not None and R > 1 and T > 1:
            bias = bias.repeat(1, 1, R, 1)
        # The query heads of a group are stacked as more queries, so keys are not repeated.
        out = F.scaled_dot_product_attention(
            rotated_BGHTD[:, :, :R].reshape(B, G, R * T, D),
            keys[:, :, : self._stop],
            values[:, :, : self._stop],
            attn_mask=bias,
            scale=scale,
        )
        return out.view(B, G, R, T, -1).permute(3, 0, 1, 2, 4).reshape(T, B, -1)

    def _in_window(self, window: int | None) -> tuple[int, Tensor | None]:
        """The first cell that the new tokens read, and an additive mask [B|1, 1, 1, T, S] of the
        cells from there on; None: no mask."""
        bias = self._bias_B1TS
        first = 0 if window is None else max(0, self.used - window + 1)
        if bias is None:
            return first, None
        bias = bias[..., first:]
        if window is not None:
            cells_S = torch.arange(first, self._stop, device=bias.device)
            cells_T1 = torch.arange(self.used, self._stop, device=bias.device)[:, None]
            bias = bias.masked_fill(cells_T1 - cells_S >= window, float("-inf"))
        return first, bias.unsqueeze(2)

    def select(self, index_B: Tensor) -> None:
        """Row i becomes the old row `index_B[i]`: repeats rows (samples of a prompt) or drops."""
        self.pad_B = self.pad_B[index_B]
        trim = int(self.pad_B.min()) if self._padded else 0
        self.pad_B = self.pad_B - trim
        for layer, (keys, values) in self._layers.items():
            kept = keys[index_B, :, trim:]
            self._layers[layer] = (kept, kept if values is keys else values[index_B, :, trim:])
        for layer, state in self.states.items():
            self.states[layer] = state.select(index_B)
        self.used -= trim
        self._capacity -= trim
        self._padded = self._padded and bool(self.pad_B.any())

    def _reserve(self, num_cells: int) -> None:
        if num_cells <= self._capacity:
            return
        wanted = max(num_cells, self._capacity * 3 // 2)
        capacity = -(-wanted // _CELL_BLOCK) * _CELL_BLOCK
        for layer, (keys, values) in self._layers.items():
            grown = self._grown(keys, capacity)
            self._layers[layer] = (
                grown,
                grown if values is keys else self._grown(values, capacity),
            )
        self._capacity = capacity

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
        new[:, :, : self.used] = old[:, :, : self.used]
        return new

    def _bias(self, cells_T: Tensor, stop: int) -> Tensor | None:
        """Additive mask [B|1, 1, T, stop]: 0 where a token attends, else -inf; None: no mask."""
        if len(cells_T) == 1 and not self._padded:
            return None
        cells_S = torch.arange(stop, device=cells_T.device)
        cells_11T1 = cells_T[:, None][None, None]
        hidden_B1TS = cells_S > cells_11T1
        if self._padded:
            hidden_B1TS = hidden_B1TS | (cells_S < self.pad_B[:, None, None, None])
        # A padding token attends to itself: a row of -inf only gives NaN, and no later mask
        # removes NaN.
        hidden_B1TS = hidden_B1TS & (cells_S != cells_11T1)
        bias = torch.zeros(hidden_B1TS.shape, dtype=self._dtype, device=cells_T.device)
        return bias.masked_fill_(hidden_B1TS, float("-inf"))
