"""Bodies of Anthropic's messages: blocks become messages of OpenAI's form, and turns blocks."""

import json

import pytest

from stable_opd_mcore.data import anthropic_api
from stable_opd_mcore.data.anthropic_api import read_request
from stable_opd_mcore.data.chat_api import (
    ChatReply,
    RequestError,
    ToolCall,
    context_full,
    episode_over,
    same_message,
)
from stable_opd_mcore.data.openai_api import Form

SCHEMA = {"type": "object", "properties": {}}
BODY = {"max_tokens": 9, "messages": [{"role": "user", "content": "1+1?"}]}
REPLY = ChatReply("So:", "Hm.", (ToolCall("abcdefghi", "add", {"x": "é"}),), "tool_calls", 5, 3)


def read(**fields):
    return read_request(json.dumps(BODY | fields).encode())[0]


def text(value):
    return {"type": "text", "text": value}


def test_a_whole_request_is_read():
    result = {"type": "tool_result", "tool_use_id": "c1"}
    messages = [
        {"role": "user", "content": [text("1+"), text("1?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                text("So:"),
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**result, "content": [text("2"), text("3")], "is_error": True},
                {**result, "tool_use_id": "c2", "content": "4"},
                text("Go on."),
            ],
        },
        {"role": "assistant", "content": "5"},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{**result, "tool_use_id": "c3"}]},
    ]
    tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA, "cache_control": {}}
    system = [text("x-anthropic-billing-header: cch=1"), text("Add."), text("Well.")]
    request, form = read_request(
        json.dumps(
            {
                **{"model": "claude", "max_tokens": 7, "stop_sequences": ["x"], "stream": True},
                **{"messages": messages, "system": system, "tools": [tool], "temperature": 1},
                **{"tool_choice": {"type": "any"}, "thinking": {"type": "adaptive"}},
                **{
                    "output_config": {"effort": "high", "format": None},
                    "metadata": {"user_id": "u"},
                },
            }
        ).encode(),
        is_retry=True,
    )
    assert form == Form("claude", streams=True)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    said = {"role": "assistant", "content": "So:", "tool_calls": [call]}
    assert request.messages == (
        {"role": "system", "content": "Add.\nWell."},
        {"role": "user", "content": "1+1?"},
        {**said, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "23"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "5"},
        {"role": "system", "content": "Be brief."},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
    )
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    assert request.tools == ({"type": "function", "function": function},)
    assert (request.max_tokens, request.stop, request.is_retry) == (7, ("x",), True)
    assert request.forces_call
    assert request.ignored == ("metadata", "output_config.effort", "temperature", "thinking")
    assert read(tools=[tool], tool_choice={"type": "none"}).tools == ()
    assert read().body_key == read(stream=True).body_key != read(max_tokens=8).body_key


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mcp_servers": [1]}, "mcp_servers=.*: not known here"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            r"output_config\.format: .*describe the format",
        ),
        ({"tool_choice": {"type": "all"}}, "expected the type auto, any, tool or none"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "no tool runs here"),
        ({"max_tokens": -1}, "max_tokens=-1: expected a whole number"),
        ({"system": [{"type": "image"}]}, "system=.*image.*: the student reads only text"),
        ({"output_config": {"colour": 1}}, r"output_config\.colour=1: not known here"),
        (
            {"messages": [*BODY["messages"], {"role": "assistant", "content": "{"}]},
            "the last message is the assistant's: .*: end the messages with one of the user",
        ),
        ({"messages": [{"role": "user", "content": [1]}]}, "has a part 1; only parts of text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "part .*document.*no images",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]},
            "tool call .*write {function: {name",
        ),
        ({"messages": 1}, "expected a list of at least one message"),
    ],
)
def test_what_cannot_be_given_is_refused(fields, message):
    with pytest.raises(RequestError, match=message) as caught:
        read(**fields)
    assert caught.value.status == 400


def test_a_reply_is_written_whole_and_as_events():
    body = anthropic_api.message(REPLY, Form("m"), "1")
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    call = {"type": "tool_use", "id": "abcdefghi", "name": "add", "input": {"x": "é"}}
    assert body["content"] == [thought, text("So:"), call]
    assert (body["stop_reason"], body["model"], body["id"]) == ("tool_use", "m", "msg_1")
    assert body["usage"] == {"input_tokens": 5, "output_tokens": 3}
    found = list(anthropic_api.events(REPLY, Form("m"), "1"))
    assert [kind for kind, _ in found] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert found[9][1]["delta"]["partial_json"] == '{"x": "é"}'
    assert anthropic_api.message(ChatReply(""), Form(), "1")["content"] == [text("")]
    stopped = ChatReply("1, ", stop_text="2")
    ended = {"stop_reason": "stop_sequence", "stop_sequence": "2"}
    assert anthropic_api.message(stopped, Form(), "1").items() >= ended.items()
    *_, (_, last), _ = anthropic_api.events(stopped, Form(), "1")
    assert last["delta"] == ended


def test_what_a_client_echoes_is_the_same_message():
    content = anthropic_api.message(REPLY, Form(), "1")["content"]
    echo, _ = read(messages=[{"role": "assistant", "content": content}, *BODY["messages"]]).messages
    assert same_message(echo, REPLY.message)


def test_errors_have_the_form_that_clients_know():
    error = anthropic_api.error_body(context_full(99, 64))["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert anthropic_api.error_body(episode_over())["error"]["type"] == "not_found_error"
    assert anthropic_api.error_body(RequestError(500, "", ""))["error"]["type"] == "api_error"
