"""The client against hostile replies; tests/integration has SGLang."""

import base64
import gzip
import json

import numpy as np
import pytest

from stable_opd_mcore.records import Routing, Sampling
from stable_opd_mcore.serving.client import ServerFailure, SglangClient
from stable_opd_mcore.serving.requests import Generation, Scoring
from tests.serving.http_server import http_server
from tests.serving.raw_server import raw_server


def test_a_compressed_reply_is_not_decompressed():
    body = gzip.compress(b"{}")
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        raw_server(lambda connection: connection.sendall(head.encode() + body)) as url,
        pytest.raises(ServerFailure, match=f"{url}: garbage: .*not JSON"),
    ):
        SglangClient(url).call("POST", "/weights_checker", {})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "not JSON"),
        (b'{"a": 1e999}', "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b" " * (33 * 1024**2), "more than 33554432 bytes"),
    ],
)
def test_hostile_replies_are_refused_by_name(body, message):
    with (
        http_server(lambda _: (200, body)) as url,
        pytest.raises(ServerFailure, match=f"{url}: garbage: .*{message}"),
    ):
        SglangClient(url).call("POST", "/weights_checker", {})


@pytest.mark.parametrize("token", [5, -1, 2.5, 1e308])
def test_top_ids_outside_the_vocabulary_are_refused(token):
    meta = {
        "input_token_logprobs": [[None, 1, None], [-0.5, 2, None]],
        "input_top_logprobs": [None, [[-0.5, token, None]]],
    }
    reply = json.dumps({"meta_info": meta}).encode()
    with (
        http_server(lambda _: (200, reply)) as url,
        pytest.raises(ServerFailure, match=f"{url}: garbage"),
    ):
        SglangClient(url).score(Scoring((1, 2), 1, 5, top_k=1))


def response_of(finish: str, experts: np.ndarray | None) -> bytes:
    """Of two tokens."""
    meta = {
        "finish_reason": {"type": finish},
        "output_token_logprobs": [[-0.5, 2, None], [-0.5, 3, None]],
        "weight_version": "7",
    }
    if experts is not None:
        meta["routed_experts"] = base64.b64encode(experts.astype(np.int32).tobytes()).decode()
    return json.dumps({"output_ids": [2, 3], "meta_info": meta}).encode()


def test_experts_are_read_from_the_position_on_that_was_asked_for():
    experts = np.array([[[5, 1]], [[0, 7]]])
    request = Generation((1, 2, 4), Sampling(max_new_tokens=9), 5, 5, Routing(1, 8, 2), 2)
    with http_server(lambda _: (200, response_of("abort", experts))) as url:
        (piece,) = SglangClient(url).generate(request)
    assert (piece.token_ids, piece.finish_reason) == ((2, 3), "abort")
    assert piece.routed_experts is not None
    assert piece.routed_experts.tolist() == experts.tolist()


def test_an_aborted_response_that_waited_has_no_experts_and_counts_as_without_tokens():
    """SGLang takes running responses back where its cache is full, and states their tokens alone
    when they are aborted then."""
    request = Generation((1, 2, 4), Sampling(max_new_tokens=9), 5, 5, Routing(1, 8, 2))
    with http_server(lambda _: (200, response_of("abort", None))) as url:
        (piece,) = SglangClient(url).generate(request)
        assert (piece.token_ids, piece.logprobs, piece.routed_experts) == ((), (), None)
        assert piece.finish_reason == "abort"
    request = Generation((1, 2, 4), Sampling(max_new_tokens=2), 5, 5, Routing(1, 8, 2))
    with (
        http_server(lambda _: (200, response_of("length", None))) as url,
        pytest.raises(ServerFailure, match=r"garbage: .*routed_experts"),
    ):
        SglangClient(url).generate(request)
