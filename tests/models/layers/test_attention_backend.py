"""Unfused attention is refused where its scores take much memory; Transformer Engine's reasons."""

import logging
from types import SimpleNamespace

import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.layers.attention_backend import (
    Attention,
    Batch,
    _reasons,
    _recorded,
    attention_lines,
    refuse_long_unfused,
)

BATCH = Batch(tokens=32768, longest=16384)


@pytest.mark.parametrize(
    ("name", "gib", "refusal"),
    [
        ("fused", 60.0, None),
        ("flash", 60.0, None),
        ("unfused", 1.9, None),
        ("unfused", 28.0, "28.0 GiB a layer, .* 32,768 tokens with sequences of 16,384; .*flash-a"),
        ("none", 0.0, "no attention for this model .cuDNN is too old.: install flash-attn"),
    ],
)
def test_unfused_attention_over_long_batches_is_refused(name, gib, refusal):
    attention = Attention(name, ("cuDNN is too old",), gib)
    if refusal is None:
        refuse_long_unfused(attention, BATCH)
        assert ("cuDNN is too old" in str(attention)) is (name == "unfused")
        return
    with pytest.raises(UserError, match=refusal):
        refuse_long_unfused(attention, BATCH)


def test_nothing_is_named_without_transformer_engine():
    assert attention_lines([[torch.nn.Linear(1, 1)]], BATCH) == []
    assert Batch(tokens=1000, longest=300).sequences == 4


def test_reasons_come_from_the_debug_log_which_stays_as_it_was(capfd):
    """The log's level is set anew in each choice, from a class attribute."""
    settings = SimpleNamespace(_log_level=logging.WARNING)
    logger = logging.getLogger("DotProductAttention")
    own = logging.StreamHandler()  # Transformer Engine gives its logger one
    logger.addHandler(own)
    with _recorded(SimpleNamespace(AttentionLogging=settings)) as records:
        logger.setLevel(settings._log_level)
        logger.debug("Running with config=%s", {"flash_attn_version": "not installed"})
        logger.debug("Disabling FusedAttention: %s", "head 512")
        logger.debug("Disabling FlashAttention to give FusedAttention preference on Hopper+")
        logger.debug("Selected backend = %s.", "UnfusedDotProductAttention")
    assert list(_reasons(records)) == [
        "flash-attn is not installed",
        "Disabling FusedAttention: head 512",
    ]
    assert settings._log_level == logging.WARNING
    assert logger.handlers == [own]
    logger.removeHandler(own)
    assert capfd.readouterr() == ("", "")
