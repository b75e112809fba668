"""The head that belongs to hidden states; on several ranks: tests/parallel/test_pipeline.py."""

import pytest

from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.hidden_states import output_head, unwrap
from stable_opd_mcore.parallel.world import World
from tests.models import tiny


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_the_models_own_parameter(world: World, tied: bool) -> None:
    architecture = tiny.architecture("qwen2", tie_word_embeddings=tied)
    chunks = build_model(architecture, world)
    head = output_head(chunks)
    assert head is not None
    embedding = unwrap(chunks[0]).embedding.word_embeddings.weight
    assert (head.weight_VH is embedding) == tied
    assert any(head.weight_VH is parameter for parameter in chunks[0].parameters())
    assert (head.vocab_start, head.vocab_size, head.group) == (0, tiny.VOCAB_SIZE, None)
    common = output_head(chunks, vocab_size=40)
    assert common is not None
    assert common.num_columns == 40
