"""Bodies of requests, and what is never sent."""

import base64
from dataclasses import replace

import numpy as np
import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.records import Sampling
from stable_opd_mcore.serving.requests import Generation, Routing, Scoring

GENERATION = Generation((1, 2), Sampling(0.7, 0.9, 16, 4, (3,)), vocab_size=5, padded_vocab_size=8)
SCORING = Scoring((1, 2, 3), start=1, vocab_size=5, top_k=2, extra_ids=(0, 4))


@pytest.mark.parametrize("request_", [GENERATION, SCORING])
@pytest.mark.parametrize("token", [-1, 5])
def test_ids_outside_the_vocabulary_are_not_sent(request_, token):
    with pytest.raises(UserError, match=f"token id {token} is outside .* vocabulary of 5"):
        replace(request_, token_ids=(1, token)).payload()


def test_generation_excludes_padding_and_stops_on_the_given_ids_only():
    sampling = GENERATION.payload()["sampling_params"]
    assert sorted(sampling["logit_bias"]) == ["5", "6", "7"]
    assert sampling["stop_token_ids"] == [3]
    assert sampling["ignore_eos"] is False
    assert (
        replace(GENERATION, padded_vocab_size=5).payload()["sampling_params"]["logit_bias"] is None
    )


def test_scoring_starts_at_the_position_before_its_first_token():
    body = SCORING.payload()
    assert body["logprob_start_len"] == 0
    assert body["top_logprobs_num"] == 2
    assert body["token_ids_logprob"] == [0, 4]


def test_replies_with_experts_may_be_larger():
    assert GENERATION.payload()["return_routed_experts"] is False
    request = replace(GENERATION, routing=Routing(2, 300, 2))
    assert request.payload()["return_routed_experts"] is True
    assert request.max_reply_bytes > GENERATION.max_reply_bytes


def test_larger_requests_allow_larger_replies():
    more = replace(GENERATION, sampling=Sampling(num_samples=8))
    assert more.max_reply_bytes > GENERATION.max_reply_bytes
    assert replace(SCORING, top_k=9).max_reply_bytes > SCORING.max_reply_bytes


def test_choices_of_experts_are_parsed_and_checked():
    routing = Routing(num_layers=2, num_experts=300, per_token=2)
    chosen = np.array([[[5, 299], [0, 1]], [[7, 8], [9, 2]], [[1, 0], [3, 4]]], dtype=np.int32)

    def parse(array: np.ndarray, positions: int = 3):
        encoded = base64.b64encode(array.tobytes()).decode()
        return routing.parse(encoded, array.dtype, positions)

    for dtype in (np.int32, np.uint16):
        assert (parse(chosen.astype(dtype)) == chosen).all()
        with pytest.raises(ValueError, match=r"outside 0 .. 299"):
            parse((chosen + 1).astype(dtype))
    with pytest.raises(ValueError, match=r"outside 0 .. 299"):
        parse(chosen - 1)
    with pytest.raises(ValueError, match="12 experts for 2 x 4 choices"):
        parse(chosen, positions=2)
    with pytest.raises(ValueError, match="chosen twice"):
        parse(np.zeros_like(chosen))
    first_is_dense = replace(routing, num_dense_layers=1)
    chosen[:, 0] = -1  # a server has no choices there
    found = first_is_dense.parse(base64.b64encode(chosen.tobytes()).decode(), np.int32, 3)
    assert (found[:, 1] == chosen[:, 1]).all()
    assert (found[:, 0] == 0).all()
    for text in ("***", "é", "AAA"):
        with pytest.raises(ValueError, match=r"[Bb]ase64|ASCII|padding"):
            routing.parse(text, np.int32, 3)
