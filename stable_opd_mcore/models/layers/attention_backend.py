"""Which attention Transformer Engine chooses for a model's packed batches, and why.

It has three. `fused` (cuDNN) and `flash` (flash-attn) need memory in proportion to the tokens.
`unfused` is its last resort: plain products that store every score of a query and a key, in
rectangles as wide as the longest sequence. Transformer Engine says why it rejects an attention only
in its debug log, which is read here. torch's layers are not concerned: models/layers/attention.py.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch.nn import Module

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.layers.path_attention import MASK
from stable_opd_mcore.models.spec import transformer_engine_is_usable

_UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
_LOGGER = "DotProductAttention"  # Transformer Engine's
# Scores of one call, in GiB, that a run may store. Softmax and backward pass hold some more copies.
MOST_UNFUSED_GIB = 2.0


@dataclass(frozen=True)
class Batch:
    """The largest packed micro-batch of a run."""

    tokens: int
    longest: int  # tokens of its longest sequence
    shares_prefixes: bool = False  # train.share_prefixes

    @property
    def sequences(self) -> int:
        return math.ceil(self.tokens / self.longest)


@dataclass(frozen=True)
class Attention:
    """What Transformer Engine chose for one kind of layer."""

    name: str  # fused | flash | unfused | none
    reasons: tuple[str, ...]  # why it rejected others, in its own words
    scores_gib: float  # what unfused attention would store of one call

    def __str__(self) -> str:
        if self.name in ("fused", "flash"):
            return f"{self.name} attention by Transformer Engine"
        return f"{self.name} attention by Transformer Engine ({self.why})"

    @property
    def why(self) -> str:
        return "; ".join(self.reasons) or "it gives no reason"


def attention_lines(models: Iterable[Iterable[Module]], batch: Batch) -> list[str]:
    """What computes the attention of these models, each a rank's chunks, as lines at a run's start;
    none where Transformer Engine computes none.

    Raises:
        UserError: unfused attention over batches that are too long for it.
    """
    found = {each: None for chunks in models for each in chosen_attentions(chunks, batch)}
    for attention in found:
        refuse_long_unfused(attention, batch)
    return list(dict.fromkeys(str(attention) for attention in found))


def refuse_long_unfused(attention: Attention, batch: Batch) -> None:
    """Raise a UserError where the scores of unfused attention take too much, or none is left."""
    if attention.name == "none":
        raise UserError(
            f"Transformer Engine has no attention for this model ({attention.why}): install "
            "flash-attn in the trainer's environment, or a cuDNN that it supports"
        )
    if attention.name != "unfused" or attention.scores_gib <= MOST_UNFUSED_GIB:
        return
    raise UserError(
        f"Transformer Engine would compute attention unfused ({attention.why}), which stores the "
        f"scores of every two tokens: {attention.scores_gib:.1f} GiB a layer, several times over, "
        f"for micro-batches of {batch.tokens:,} tokens with sequences of {batch.longest:,}; at "
        f"most {MOST_UNFUSED_GIB:g} GiB are accepted. Install flash-attn in the trainer's "
        "environment, or the cuDNN that the trainer's torch brings; or lower "
        "train.micro_batch_tokens and sampling.max_new_tokens"
    )


def chosen_attentions(chunks: Iterable[Module], batch: Batch) -> list[Attention]:
    """What Transformer Engine chooses for the layers of a model, once for each kind of layer."""
    modules = [module for chunk in chunks for module in attentions_of_engine(chunk)]
    # layers differ only in their window
    return [_chosen(each, batch) for each in {m.window_size: m for m in modules}.values()]


def attentions_of_engine(chunk: Module) -> list[Any]:
    """Transformer Engine's attention of each layer; none where torch computes it."""
    if not transformer_engine_is_usable():
        return []
    extension: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    return [each for each in chunk.modules() if isinstance(each, extension.TEDotProductAttention)]


def _chosen(module: Any, batch: Batch) -> Attention:
    utils: Any = importlib.import_module(_UTILS)
    config = module.config
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    context = config.context_parallel_size
    values = {
        "qkv_dtype": config.params_dtype,
        "qkv_layout": "thd_thd_thd",
        "batch_size": batch.sequences,
        "num_heads": heads,
        "num_gqa_groups": module.num_gqa_groups_per_partition,
        "max_seqlen_q": batch.longest,
        "max_seqlen_kv": batch.longest,
        "num_tokens_q": batch.tokens // context,
        "num_tokens_kv": batch.tokens // context,
        "head_dim_qk": module.hidden_size_per_attention_head_k,
        "head_dim_v": module.hidden_size_per_attention_head_v,
        "attn_mask_type": MASK if batch.shares_prefixes else "padding_causal",
        "window_size": module.window_size,
        "core_attention_bias_requires_grad": False,
        "attention_dropout": module.attention_dropout,
        "context_parallel": context > 1,
        "cp_comm_type": module.cp_comm_type,
        "cp_size": context,
        "deterministic": module.deterministic,
        "is_training": module.training,
        "softmax_type": module.softmax_type,
        "softmax_scale": module.softmax_scale,
    }
    known = {field.name for field in fields(utils.AttentionParams)}  # differ between releases
    parameters = utils.AttentionParams(**{k: v for k, v in values.items() if k in known})
    with _recorded(utils) as records:
        flash, _, fused, _, unfused, _ = utils.get_attention_backend(parameters)
    name = "flash" if flash else "fused" if fused else "unfused" if unfused else "none"
    scores = batch.sequences * heads * batch.longest**2 * config.params_dtype.itemsize
    return Attention(name, tuple(_reasons(records)), scores / 2**30)


def _reasons(records: Iterable[logging.LogRecord]) -> Iterator[str]:
    for record in records:
        text = record.getMessage()
        if text.startswith("Disabling") and "preference" not in text:
            yield text.rstrip(".")
        found = record.args if isinstance(record.args, dict) else {}
        if found.get("flash_attn_version") == "not installed":
            yield "flash-attn is not installed"


class _Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def _recorded(utils: Any) -> Iterator[list[logging.LogRecord]]:
    """What Transformer Engine logs of its choice, which is not printed meanwhile."""
    logger, recorder = logging.getLogger(_LOGGER), _Recorder()
    settings = getattr(utils, "AttentionLogging", None)
    before = settings and settings._log_level, logger.level, logger.propagate, logger.handlers
    if settings is not None:  # it sets the logger's level anew in each choice
        settings._log_level = logging.DEBUG
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers = [recorder]
    try:
        yield recorder.records
    finally:
        if settings is not None:
            settings._log_level = before[0]
        logger.setLevel(before[1])
        logger.propagate, logger.handlers = before[2], before[3]
