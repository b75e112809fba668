"""The client against hostile replies; tests/integration has SGLang."""

import pytest

from stable_opd_mcore.serving.client import ServerFailure, SglangClient
from tests.serving.http_server import http_server


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
