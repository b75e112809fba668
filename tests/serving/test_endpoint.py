"""The URL of an agent over real sockets: replies, events, waiting, hanging up, and bad requests."""

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import threading

import httpx
import pytest

from stable_opd_mcore.data.chat_api import ChatReply, episode_over, unknown_episode
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.serving.endpoint import listen
from tests.serving.agent_url import agent_url

BODY = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 3}
STREAM = BODY | {"stream": True, "stream_options": {"include_usage": True}}
WAIT = 0.05


async def echo(secret, request):
    """The last message, after the tenths of seconds that `max_tokens` says beyond 3; or an
    error that the message names."""
    await asyncio.sleep(((request.max_tokens or 3) - 3) / 10)
    text = request.messages[-1]["content"]
    if text == "over":
        raise episode_over()
    if text == "defect":
        raise KeyError(text)
    if secret != "secret":
        raise unknown_episode()
    return ChatReply(f"{text} {request.is_retry}", prompt_tokens=4, completion_tokens=2)


@pytest.fixture(scope="module")
def base_url():
    with agent_url(echo, max_body_bytes=2**16, keep_alive_seconds=WAIT) as url:
        yield url


@pytest.fixture(scope="module")
def client():
    with httpx.Client(timeout=10) as opened:
        yield opened


def test_a_turn_is_asked_for_and_given(base_url, client):
    for url in (base_url, f"{base_url}/v1", base_url.removesuffix("/v1")):
        found = client.post(f"{url}/chat/completions", json=BODY)
        assert found.status_code == 200
        assert found.content.startswith(b"{")  # strict parsers want no space before it
        assert found.json()["choices"][0]["message"]["content"] == "1+1? False"
    for count, is_retry in (("0", False), ("1", True)):
        headers = {"x-stainless-retry-count": count}
        found = client.post(f"{base_url}/chat/completions", json=BODY, headers=headers)
        assert found.json()["choices"][0]["message"]["content"] == f"1+1? {is_retry}"
    assert client.get(f"{base_url}/models").json()["data"][0]["id"] == "student"
    assert client.get(f"{base_url}/models/me/mine").json()["id"] == "me/mine"


def events(text):
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def test_a_turn_comes_as_events(base_url, client):
    found = client.post(f"{base_url}/chat/completions", json=STREAM)
    assert found.headers["content-type"] == "text/event-stream"
    assert found.text.endswith("data: [DONE]\n\n")
    *parts, usage = events(found.text)
    content = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert "".join(content) == "1+1? False"
    assert usage["usage"]["total_tokens"] == 6


def test_anthropics_api_is_served_too(base_url, client):
    found = client.post(f"{base_url}/messages", json=BODY)
    assert found.json()["content"] == [{"type": "text", "text": "1+1? False"}]
    found = client.post(f"{base_url}/messages", json=BODY | {"stream": True, "max_tokens": 5})
    assert found.text.startswith('event: ping\ndata: {"type": "ping"}\n\n')
    assert found.text.endswith('event: message_stop\ndata: {"type": "message_stop"}\n\n')
    found = client.post(f"{base_url}/messages/count_tokens", json=BODY)
    assert found.status_code == 404
    assert "the usage of each reply is exact" in found.json()["error"]["message"]
    assert found.json()["type"] == "error"


def test_a_client_that_waits_hears_something(base_url, client):
    found = client.post(f"{base_url}/chat/completions", json=BODY | {"max_tokens": 5})
    assert found.content.startswith(b"  ")
    assert found.json()["choices"][0]["message"]["content"] == "1+1? False"
    found = client.post(f"{base_url}/chat/completions", json=STREAM | {"max_tokens": 5})
    assert found.text.startswith(": the student is still sampling\n\n: ")
    assert len(events(found.text)) == 4


@pytest.mark.parametrize(
    ("text", "status", "code"), [("over", 410, "episode_over"), ("defect", 500, "defect")]
)
def test_an_error_has_its_status_or_ends_what_has_begun(
    base_url, client, caplog, text, status, code
):
    caplog.set_level(logging.CRITICAL)
    url, messages = f"{base_url}/chat/completions", [{"role": "user", "content": text}]
    for body in (BODY, STREAM):
        found = client.post(url, json=body | {"messages": messages})
        assert (found.status_code, found.json()["error"]["code"]) == (status, code)
    found = client.post(url, json=STREAM | {"messages": messages, "max_tokens": 5})
    assert events(found.text.replace("event: error\n", ""))[0]["error"]["code"] == code
    with pytest.raises(httpx.RemoteProtocolError):  # the client asks again
        client.post(url, json=BODY | {"messages": messages, "max_tokens": 5})


def test_another_episodes_url_is_unknown(base_url, client):
    found = client.post(base_url.replace("secret", "other") + "/chat/completions", json=BODY)
    assert (found.status_code, found.json()["error"]["code"]) == (404, "unknown_episode")


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "responses", 404, "set_default_openai_api('chat_completions')"),
        ("POST", "completions", 404, "send messages to chat/completions"),
        ("POST", "images/generations", 404, "use base_url as it was given"),
        ("GET", "chat/completions", 405, "takes only POST"),
        ("POST", "../../secret/../other", 404, "use base_url as it was given"),
    ],
)
def test_other_urls_are_refused_with_what_to_do(base_url, client, method, path, status, text):
    found = client.request(method, f"{base_url}/{path}", json=BODY)
    assert found.status_code == status
    assert text in found.json()["error"]["message"]


def test_bad_bodies_are_refused(base_url, client, caplog):
    url = f"{base_url}/chat/completions"
    found = client.post(url, content=b"{")
    assert found.status_code == 400
    assert "not valid JSON" in found.json()["error"]["message"]
    large = b" " * 2**17
    for content in (large, iter([large])):  # with its length, and in chunks without one
        found = client.post(url, content=content)
        assert found.status_code == 413
        assert "at most 65536 are read" in found.json()["error"]["message"]
    with contextlib.suppress(httpx.TransportError):  # a body without an end is broken off
        client.post(url, content=itertools.repeat(large))
    with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)) as leaving:
        leaving.sendall(
            b"POST /secret/v1/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{"
        )
    assert client.post(url, json=BODY).status_code == 200
    assert caplog.records == []


@pytest.mark.parametrize("body", [BODY, STREAM])
@pytest.mark.parametrize("keep_alive", [10.0, 0.02])  # nothing was sent, or a part
def test_a_client_that_hangs_up_cancels_its_turn(body, keep_alive):
    seen, cancelled = threading.Event(), threading.Event()

    async def answer(secret, request):
        seen.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with agent_url(answer, keep_alive_seconds=keep_alive) as base_url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{base_url}/chat/completions", json=body, timeout=httpx.Timeout(2, read=0.01)
            )
        assert seen.wait(5)
        assert cancelled.wait(5)


def test_a_reply_whose_client_has_gone_is_told():
    """It is there before the loop, which is busy, has read the end of the connection."""
    seen, gone, told = threading.Event(), threading.Event(), []

    async def answer(secret, request):
        seen.set()
        assert gone.wait(5)
        return await echo(secret, request)

    def undelivered(secret, request):
        told.append((secret, request.messages[-1]["content"]))

    with agent_url(answer, undelivered=undelivered) as base_url:
        url = httpx.URL(base_url)
        for text in ("over", "lost"):  # an error is no turn
            body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
            head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: a\r\n"
            with socket.create_connection((url.host, url.port)) as client:
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                assert seen.wait(5)
            seen.clear()
            gone.set()
            assert httpx.post(f"{base_url}/chat/completions", json=BODY).status_code == 200
            gone.clear()
    assert told == [("secret", "lost")]


def test_a_thousand_calls_at_once_are_all_answered():
    waiting, everyone = [0], asyncio.Event()

    async def answer(secret, request):
        waiting[0] += 1
        if waiting[0] == 1000:
            everyone.set()
        await everyone.wait()
        return ChatReply(request.messages[-1]["content"])

    async def ask(address, number):
        body = json.dumps({"messages": [{"role": "user", "content": str(number)}]}).encode()
        reader, writer = await asyncio.open_connection(*address)
        head = "POST /s/v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        found = await reader.read()
        writer.close()
        return f'"content": "{number}"'.encode() in found

    async def ask_all(address):
        return await asyncio.gather(*(ask(address, number) for number in range(1000)))

    with agent_url(answer) as base_url:
        url = httpx.URL(base_url)
        assert all(asyncio.run(ask_all((url.host, url.port))))


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(UserError, match=r"served at 192\.0\.2\.1, port 0.*environment\.address"):
        listen("192.0.2.1")
    with listen("127.0.0.1") as taken, pytest.raises(UserError, match="Address already in use"):
        listen("127.0.0.1", taken.getsockname()[1])
