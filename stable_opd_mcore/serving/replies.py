"""What SGLang replies, checked and read into arrays. Pure functions; they raise for anything else.

A response is refused unless its ids are in the vocabulary, each token has a finite log-probability
and the finish reason fits the request.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from stable_opd_mcore.endings import Ending
from stable_opd_mcore.records import SequenceScores
from stable_opd_mcore.serving.exchange import RefusedRequest, ServerFailure
from stable_opd_mcore.serving.requests import Completion, Generation, Scoring

UNUSABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # what a reply raises
_ROUNDING = 1e-3  # a log-probability may exceed 0 by this much
_RETRYABLE_STATUSES = (408, 429)  # request time-out, too many requests
_PLAIN_TEXT = ("/flush_cache", "/abort_request", "/freeze_gc")  # routes that reply with a sentence


def content_of(url: str, path: str, status: int, content: bytes | bytearray) -> Any:
    """What a reply says, if it says that the request was fulfilled.

    A sentence is returned as str, "" as None.

    Raises:
        ServerFailure: 5xx, 408 or 429, or not JSON.
        RefusedRequest: any other 4xx.
    """
    if status >= 500 or status in _RETRYABLE_STATUSES:
        raise ServerFailure(url, "status", f"{path}: HTTP {status}", transient=True)
    if status >= 400:
        raise RefusedRequest(url, path, status, content[:500].decode(errors="replace"))
    if path.partition("?")[0] in _PLAIN_TEXT:
        return content.decode(errors="replace")
    if not content:
        return None
    try:
        return orjson.loads(content)  # refuses NaN, Infinity and what overflows to it
    except ValueError as error:
        detail = f"{path}: not JSON: {bytes(content[:80])!r}"
        raise ServerFailure(url, "garbage", detail, transient=True) from error


def read_completion(response: Any, request: Generation) -> Completion:
    """The response to a request, without its text. Raises UNUSABLE."""
    meta, sampling = response["meta_info"], request.sampling
    finish = _ending(meta["finish_reason"]["type"])
    ids = _ids(response["output_ids"])
    logprobs, scored_ids = _scored(meta["output_token_logprobs"])
    if not np.array_equal(ids, scored_ids):
        raise ValueError(f"{len(ids)} tokens, but {len(scored_ids)} log-probabilities of others")
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
    versions = tuple(str(span["version"]) for span in spans)
    counts = ("cached_tokens", "spec_verify_ct", "spec_num_correct_drafts")
    cached, judgements, accepted = map(int, _ids([meta.get(key) or 0 for key in counts]))
    last = int(ids[-1]) if len(ids) else None
    if last in sampling.stop_token_ids:
        finish = Ending.STOP  # SGLang states "length" for a stop token at max_new_tokens
    elif finish == Ending.OPEN and len(ids) == sampling.max_new_tokens:
        finish = Ending.LENGTH  # aborted while its last token was sampled
    _require_usable(ids, finish, request)
    experts = None
    if request.routing is not None and len(ids):
        positions = len(request.token_ids) + len(ids) - 1
        experts = request.routing.parse(meta["routed_experts"], np.int32, positions)
    return Completion(ids, logprobs, finish, versions, cached, judgements, accepted, experts)


def _ending(finish_reason: Any) -> Ending:
    """Why a response ended, from SGLang's reason. An aborted one may get more tokens."""
    known = {"stop": Ending.STOP, "length": Ending.LENGTH, "abort": Ending.OPEN}
    if finish_reason not in known:
        raise ValueError(f"finish reason {finish_reason!r}, expected stop, length or abort")
    return known[finish_reason]


def _require_usable(ids: NDArray[np.int32], finish: Ending, request: Generation) -> None:
    """Refuse a response that does not fit the request."""
    longest, stops = request.sampling.max_new_tokens, request.sampling.stop_token_ids
    least = 0 if finish == Ending.OPEN else 1
    if not least <= len(ids) <= longest:
        raise ValueError(f"{len(ids)} tokens, requested {least} to {longest}")
    _require_below(ids, request.vocab_size)
    if finish == Ending.STOP and int(ids[-1]) not in stops:
        raise ValueError(f"finish reason 'stop' with last token {ids[-1]}")
    if finish == Ending.LENGTH and len(ids) != longest:
        raise ValueError(f"finish reason 'length' after {len(ids)} of {longest} tokens")


def read_scores(reply: Any, request: Scoring) -> SequenceScores:
    """The scores that a request asked for. Raises UNUSABLE."""
    meta, sent = reply["meta_info"], np.asarray(request.token_ids, np.int32)[request.start :]
    logprobs, ids = _scored(meta["input_token_logprobs"][1:])
    last = request.vocab_size - 1  # SGLang reports the last id of its vocabulary as 0
    if not np.array_equal(ids, sent) and not np.array_equal(ids, np.where(sent == last, 0, sent)):
        raise ValueError(
            f"scores of {len(ids)} tokens {ids[:8].tolist()}..., "
            f"requested of {len(sent)} tokens {sent[:8].tolist()}..."
        )
    top_logprobs, top_ids = _top(meta, len(sent), request.top_k)
    _require_below(top_ids, np.iinfo(np.int32).max if request.any_top_id else request.vocab_size)
    extra = meta["input_token_ids_logprobs"][1:] if request.extra_ids else []
    extra_logprobs, _ = _table(extra, len(sent), len(request.extra_ids))
    return SequenceScores(logprobs, top_ids, top_logprobs.astype(np.float16), extra_logprobs)


def _top(meta: Any, length: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities and ids of the top-K lists, [length, width] each."""
    if not width:
        return _table([], length, 0)
    if "input_top_logprobs_val_flat_b64" not in meta:  # SGLang falls back to lists for some rows
        return _table(meta["input_top_logprobs"][1:], length, width)
    shape = meta["input_top_logprobs_shape"]
    if shape != [length, width]:
        raise ValueError(f"top-K lists of shape {shape}, expected {[length, width]}")
    encoded = meta["input_top_logprobs_val_flat_b64"], meta["input_top_logprobs_idx_flat_b64"]
    of_values, of_ids = (bytearray(base64.b64decode(text)) for text in encoded)
    values = np.frombuffer(of_values, np.float32).reshape(length, width)
    ids = np.frombuffer(of_ids, np.int32).reshape(length, width)
    _require_logprobs(values)
    return values, ids


def _table(
    rows: Sequence[Any], length: int, width: int
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Log-probabilities and ids of lists of SGLang's entries, [length, width] each."""
    if width and [len(row) for row in rows] != [width] * length:
        raise ValueError(f"not {length} lists of {width} entries")
    logprobs, ids = _scored(list(itertools.chain.from_iterable(rows)))
    return logprobs.reshape(length, width), ids.reshape(length, width)


def _scored(entries: Sequence[Any]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The log-probabilities and the ids of SGLang's [log-probability, id, text]."""
    with np.errstate(over="ignore"):
        logprobs = np.array([value for value, _, _ in entries], np.float32)
    if logprobs.ndim != 1:
        raise ValueError("a log-probability is a list, expected a number")
    _require_logprobs(logprobs)
    return logprobs, _ids([token for _, token, _ in entries])


def _require_logprobs(values: NDArray[np.float32]) -> None:
    if not (np.isfinite(values) & (values <= _ROUNDING)).all():
        raise ValueError("a log-probability is above 0 or not finite")


def _require_below(ids: NDArray[np.int32], size: int) -> None:
    if ids.size and not 0 <= ids.min() <= ids.max() < size:
        raise ValueError(f"a token is outside the vocabulary of {size}")


def _ids(values: Sequence[Any]) -> NDArray[np.int32]:
    """Integers as an array."""
    if not values:
        return np.empty(0, np.int32)
    array = np.array(values)
    if array.ndim != 1 or array.dtype != np.int64:
        raise ValueError("not a list of integers")
    if not -(2**31) <= array.min() <= array.max() < 2**31:
        raise ValueError(f"{array.max()} is too large for an id")
    return array.astype(np.int32)
