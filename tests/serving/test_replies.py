"""Replies of SGLang 0.5.23, and replies that cannot be used."""

import base64
from typing import Any

import numpy as np
import pytest

from stable_opd_mcore.records import Sampling
from stable_opd_mcore.serving.exchange import RefusedRequest, ServerFailure
from stable_opd_mcore.serving.replies import UNUSABLE, content_of, read_completion, read_scores
from stable_opd_mcore.serving.requests import Generation, Routing, Scoring

REQUEST = Generation((1, 2, 4), Sampling(max_new_tokens=3, stop_token_ids=(9,)), 10)


def response_of(finish: Any, *ids: Any, **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "7",
            **meta,
        },
    }


ENDED = [
    ("length", [2, 3, 5], "length"),
    ("stop", [2, 9], "stop"),
    ("length", [2, 3, 9], "stop"),  # its last token may be a stop token
    ("abort", [2], "open"),
    ("abort", [], "open"),
    ("abort", [2, 3, 5], "length"),  # aborted while its last token was sampled
]  # finish, ids, read


def test_a_response_is_read_into_arrays():
    for finish, ids, read in ENDED:
        completion = read_completion(response_of(finish, *ids), REQUEST)
        assert completion.token_ids.tolist() == ids
        assert completion.logprobs.tolist() == [-0.5] * len(ids)
        assert completion.token_ids.flags.writeable
        assert completion.logprobs.flags.writeable
        assert (completion.finish_reason, completion.weight_versions) == (read, ("7",))


def test_a_draft_is_counted_by_what_the_student_accepted_of_it():
    """A pass of the student gives one token of its own in addition."""
    judged = response_of("length", 2, 3, 5, spec_verify_ct=2, spec_num_correct_drafts=1)
    plain = response_of("length", 2, 3, 5)
    found = [read_completion(each, REQUEST) for each in (judged, plain)]
    assert [(each.judgements, each.accepted_tokens) for each in found] == [(2, 1), (0, 0)]


UNFIT_RESPONSES = [
    {},
    response_of("stop", 2, 3),
    response_of("length", 2),
    response_of("length"),
    response_of("length", 2, 3, 10),
    response_of("length", 2, 3, 2**70),
    response_of("length", 2, 3, 4.0),
    response_of("length", 2, 3, [4]),
    response_of("whatever", 2),
    response_of("abort", 2, output_token_logprobs=[[-0.5, 3, None]]),
    response_of("abort", 2, output_token_logprobs=[[None, 2, None]]),
    response_of("abort", 2, output_token_logprobs=[[0.5, 2, None]]),
    response_of("abort", 2, output_token_logprobs=[[1e300, 2, None]]),
    response_of("abort", 2, cached_tokens="many"),
]  # response


def test_a_response_that_does_not_fit_the_request_is_refused():
    for response in UNFIT_RESPONSES:
        with pytest.raises(UNUSABLE):
            read_completion(response, REQUEST)


def test_experts_of_each_token_but_the_last_are_read():
    experts = np.array([[[5, 1]], [[0, 7]], [[2, 3]]], np.int32)
    request = Generation((1, 2), Sampling(max_new_tokens=2), 5, 5, Routing(1, 8, 2))
    encoded = base64.b64encode(experts.tobytes()).decode()
    piece = read_completion(response_of("length", 2, 3, routed_experts=encoded), request)
    assert piece.routed_experts is not None
    assert piece.routed_experts.tolist() == experts.tolist()


def flat(values: list[list[float]], ids: list[list[int]]) -> dict[str, Any]:
    """The top-K lists as SGLang encodes them where it can."""
    fields = {"val": np.array(values, np.float32), "idx": np.array(ids, np.int32)}
    encoded = {
        f"input_top_logprobs_{name}_flat_b64": base64.b64encode(array.tobytes()).decode()
        for name, array in fields.items()
    }
    return encoded | {"input_top_logprobs_shape": list(fields["val"].shape)}


def scores_of(*ids: Any, **meta: Any) -> dict[str, Any]:
    """A reply with the scores of the tokens after the first one."""
    entries = [[None, 1, None], *([-0.5, token, None] for token in ids)]
    return {"meta_info": {"input_token_logprobs": entries, **meta}}


NESTED = {"input_top_logprobs": [None, [[-0.5, 3, None], [-1.5, 0, None]], [[-0.25, 1, None]] * 2]}
FLAT = flat([[-0.5, -1.5], [-0.25, -0.25]], [[3, 0], [1, 1]])


@pytest.mark.parametrize("lists", [NESTED, FLAT])
def test_scores_are_read_from_lists_and_from_arrays(lists):
    extra = {"input_token_ids_logprobs": [None, [[-2.0, 4, None]], [[-3.0, 4, None]]]}
    request = Scoring((1, 2, 4), 1, 5, top_k=2, extra_ids=(4,))
    scores = read_scores(scores_of(2, 0, **lists, **extra), request)  # 0 stands for the last id
    assert scores.logprobs_L.tolist() == [-0.5, -0.5]
    assert scores.top_ids_LK.tolist() == [[3, 0], [1, 1]]
    assert scores.top_logprobs_LK.tolist() == [[-0.5, -1.5], [-0.25, -0.25]]
    assert scores.extra_logprobs_LE.tolist() == [[-2.0], [-3.0]]
    assert all(array.flags.writeable for array in vars(scores).values())


UNFIT_SCORES = [
    {},
    scores_of(2),
    scores_of(3, **flat([[-0.5]], [[3]])),
    scores_of(2, 3, **flat([[-0.5]], [[3]])),
    *(
        scores_of(2, input_top_logprobs=[None, [[-0.5, token, None]]])
        for token in (5, -1, 2.5, 1e308)
    ),
    scores_of(2, input_top_logprobs=[None, []]),
    scores_of(2, **flat([[-0.5, -0.5]], [[3, 3]])),
    scores_of(2, **flat([[-0.5]], [[5]])),
    scores_of(2, **flat([[float("nan")]], [[3]])),
    scores_of(2, **flat([[-0.5]], [[3]]) | {"input_top_logprobs_val_flat_b64": "AAAA"}),
]  # reply


def test_scores_that_do_not_fit_the_request_are_refused():
    for reply in UNFIT_SCORES:
        with pytest.raises(UNUSABLE):
            read_scores(reply, Scoring((1, 2), 1, 5, top_k=1))


def test_a_status_is_a_failure_or_a_refusal():
    for status in (500, 429, 408):
        with pytest.raises(ServerFailure, match=f"HTTP {status}") as failure:
            content_of("http://here", "/generate", status, b"")
        assert failure.value.transient
    with pytest.raises(RefusedRequest, match="http://here/generate: HTTP 404: no such"):
        content_of("http://here", "/generate", 404, b"no such")
    assert content_of("http://here", "/flush_cache?timeout=5", 200, b"Cache flushed") == (
        "Cache flushed"
    )
    assert content_of("http://here", "/begin_weight_update", 200, b"") is None
