"""A teacher's server in this process, whose scores are a function of the tokens. Not SGLang."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.serving.http_server import Request, http_server

Asked = list[tuple[int, ...]]  # the tokens of each request, in the order in which they came


@contextlib.contextmanager
def fake_teacher(
    before_reply: Callable[[tuple[int, ...]], bool] = lambda _: True,
) -> Iterator[tuple[str, Asked]]:
    """Yields the server's address, and the tokens of each request.

    before_reply: gets the tokens of a request in its thread; if False, the reply is HTTP 503.
    """
    asked: Asked = []
    lock = threading.Lock()

    def reply(request: Request) -> tuple[int, bytes]:
        body = json.loads(request.body)
        tokens = tuple(body["input_ids"])
        with lock:
            asked.append(tokens)
        if not before_reply(tokens):
            return 503, b"busy"
        return 200, json.dumps({"meta_info": scores_of(body)}).encode()

    with http_server(reply) as url:
        yield url, asked


def scores_of(body: dict[str, Any]) -> dict[str, Any]:
    """What SGLang says of a scoring request: a log-probability of prefix and token."""
    ids = body["input_ids"]
    scored = range(body["logprob_start_len"] + 1, len(ids))

    def entry(place: int, token: int) -> list[Any]:
        return [-((17 * sum(ids[:place]) + 29 * token) % 1009 + 1) / 307, token, None]

    looked_up, listed = body["token_ids_logprob"] or (), range(body["top_logprobs_num"])
    return {
        "input_token_logprobs": [[None, 0, None], *(entry(place, ids[place]) for place in scored)],
        "input_token_ids_logprobs": [None, *([entry(p, t) for t in looked_up] for p in scored)],
        "input_top_logprobs": [
            None,
            *(sorted((entry(p, t) for t in listed), key=lambda e: -e[0]) for p in scored),
        ],
    }
