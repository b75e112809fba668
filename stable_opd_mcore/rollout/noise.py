"""Sampling, with noise that is a pure function of (seed, step, prompt, sample, position).

With a sequential random stream, a rollout would depend on the other rows of its batch, on the
parallel layout and on restarts. Here a row's 64-bit key is a BLAKE2b digest of (seed, step, prompt
id, sample index), and its sampled token t uses output t of the SplitMix64 generator seeded with
that key (Steele, Lea, Flood 2014: state + (t+1) * gamma, then a bijective mix). What is observed
between turns is not counted.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from stable_opd_mcore.records import Sampling

# logits_BV, keys_B, positions_B, sampling -> tokens_B, logprobs_B: see `sample_rows`
Sampler = Callable[[Tensor, Tensor, Tensor, Sampling], tuple[Tensor, Tensor]]


def _signed(value: int) -> int:
    """An unsigned 64-bit value as int64, which torch needs."""
    return value - (1 << 64) if value >> 63 else value


GAMMA = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def row_key(seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """The signed 64-bit key of one rollout's noise, the same in every process."""
    name = f"{seed}/{step}/{sample_index}/{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def uniforms(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """Uniforms in [0, 1), float64 [B], for the sampled tokens at int64 positions of rollouts with
    these int64 keys; one of the two may be [], for all rows.

    53 bits each; int64 arithmetic wraps modulo 2^64, and masks make the shifts logical.
    """
    state = keys_B + (positions_B + 1) * GAMMA
    state = (state ^ _shift(state, 30)) * MIX_1
    state = (state ^ _shift(state, 27)) * MIX_2
    state = state ^ _shift(state, 31)
    return _shift(state, 11).double() * 2.0**-53


def _shift(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def sample_rows(
    logits_BV: Tensor, keys_B: Tensor, positions_B: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """`sample_tokens` with the noise of rows with these keys at these positions, both int64."""
    noise_B = uniforms(keys_B, positions_B)
    return sample_tokens(logits_BV, sampling.temperature, sampling.top_p, noise_B)


def sample_tokens(
    logits_BV: Tensor, temperature: float, top_p: float, uniform_B: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverse CDF.

    Args:
        logits_BV: fp32, the common vocabulary only (no padded columns).
        temperature: 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens whose mass reaches this.
        uniform_B: float64 in [0, 1); unused when the temperature is 0.

    Returns:
        tokens_B (int64) and logprobs_B (fp32). The log-probabilities are of the full softmax at the
        temperature (greedy: at 1), which the loss compares, and not renormalised over the top-p
        set. A token of probability zero is never sampled.
    """
    if temperature == 0:
        logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
        tokens_B = logits_BV.argmax(dim=-1)
        return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    assert uniform_B is not None
    logprobs_BV = torch.log_softmax(
        logits_BV if temperature == 1 else logits_BV / temperature, dim=-1
    )
    mass_BV = logprobs_BV.exp()
    if top_p < 1:
        mass_BV = _keep_top_p(mass_BV, top_p)
    # In fp32 the sum would swallow the small masses of the vocabulary's tail.
    cdf_BV = mass_BV.cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cdf_BV[:, -1:].contiguous()
    # Strictly below the total: u * total rounded up to it would select a token without mass.
    target_B1 = torch.minimum(
        uniform_B[:, None] * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1))
    )
    tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True)
    return tokens_B1[:, 0], logprobs_BV.gather(1, tokens_B1)[:, 0]


def _keep_top_p(mass_BV: Tensor, top_p: float) -> Tensor:
    """Zero the mass outside the nucleus; keeps the most likely token, and on ties the lower id."""
    sorted_BV, order_BV = mass_BV.sort(dim=-1, descending=True, stable=True)
    before_BV = sorted_BV.cumsum(dim=-1, dtype=torch.float64) - sorted_BV
    sorted_BV = sorted_BV.masked_fill(before_BV >= top_p, 0.0)
    return torch.zeros_like(mass_BV).scatter_(1, order_BV, sorted_BV)
