"""Bodies of OpenAI's chat completions: what is honoured, ignored, refused, and what is written."""

import json

import pytest

from stable_opd_mcore.data import openai_api
from stable_opd_mcore.data.chat_api import ChatReply, RequestError, ToolCall, context_full
from stable_opd_mcore.data.openai_api import Form, read_request

USER = {"role": "user", "content": "1+1?"}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


def read(**fields):
    return read_request(json.dumps({"messages": [USER], **fields}).encode())[0]


def test_a_whole_request_is_read():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    text = {"type": "text", "text": "1+"}
    messages = [
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": [text, {"type": "text", "text": "1?"}], "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning": " Hm.\n"},
        {**USER, "cache_control": {"type": "ephemeral"}},
    ]
    body = {
        **{"model": "gpt-4", "messages": messages, "tools": [TOOL], "tool_choice": "required"},
        **{"max_tokens": 9, "max_completion_tokens": 7, "stop": "\n", "temperature": 0.0},
        **{"n": 1, "logprobs": False, "response_format": {"type": "text"}, "audio": None},
        **{"stream": True, "stream_options": {"include_usage": True}, "user": "u"},
    }
    body["tools"] = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    request, form = read_request(json.dumps(body).encode(), is_retry=True)
    assert form == Form("gpt-4", streams=True, includes_usage=True)
    assert request.messages == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "add", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "Hm."},
        USER,
    )
    assert request.tools == (TOOL,)
    assert (request.max_tokens, request.stop) == (7, ("\n",))
    assert request.is_retry
    assert request.forces_call
    assert request.ignored == (
        *("messages.cache_control", "messages.name", "temperature", "tools.strict", "user"),
    )


def test_forbidden_tools_are_not_read():
    assert read(tools=[TOOL], tool_choice="none").tools == ()
    for form in (FUNCTION, {"type": "function", **FUNCTION}, TOOL | {"defer_loading": True}):
        assert read(tools=[form]).tools == (TOOL,)
    assert read(tools=[{"type": "function", "name": "add"}]).tools[0]["function"] == {"name": "add"}
    assert read(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})


def test_nulls_of_a_schema_are_read():
    """Pydantic writes them as defaults, and servers pass them on to the chat template."""
    parameters = {"type": "object", "properties": {"x": {"type": "integer", "default": None}}}
    function = FUNCTION | {"parameters": parameters}
    given = {"type": "function", "function": {**function, "strict": None, "description": None}}
    assert read(tools=[given]).tools == ({"type": "function", "function": function},)


WITHOUT_EFFECT = [
    {"prompt_cache_options": {"mode": "implicit"}},  # openai-python 3
    {"mcp_servers": [], "provider": {}},  # nothing is asked for
    {"add_generation_prompt": True, "continue_final_message": False, "echo": False},  # vLLM's
    {"include_reasoning": True, "stream_reasoning": True, "request_id": "a", "priority": 0},
    {"ignore_eos": False, "min_tokens": 0, "use_beam_search": False, "length_penalty": 1.0},
    {"messages": [USER, {"role": "assistant", "content": "2", "prefix": False}, USER]},
]


def test_defaults_of_clients_change_nothing():
    for fields in WITHOUT_EFFECT:
        assert read(**fields)
    assert read(max_tokens=9.0).max_tokens == 9
    assert read(tool_choice="any").forces_call  # Mistral's word


def test_equal_bodies_have_one_key():
    def key(text):
        return read_request(text.encode())[0].body_key

    first = '{"messages": [{"role": "user", "content": "\\ud83d"}], "temperature": 1.0}'
    other = '{"stream": true, "temperature": 1, "messages":[{"content":"\\uD83D","role":"user"}]}'
    assert key(first) == key(other) != key(first.replace("1.0", "2"))


def test_arguments_of_the_template_are_those_of_the_run():
    body = {"messages": [USER], "reasoning_effort": "low"}
    kwargs = {"reasoning_effort": "low", "enable_thinking": False}
    also = {**body, "chat_template_kwargs": {"enable_thinking": False}}
    for each in (body, also):
        assert read_request(json.dumps(each).encode(), kwargs)
        with pytest.raises(RequestError, match=r"student\.chat_template_kwargs, \{\}"):
            read_request(json.dumps(each).encode())


NOT_GIVEN = [
    ({"n": 2}, "n=2: one turn is sampled at a time"),
    ({"logprobs": True}, "logprobs=True: an agent gets no log-probabilities"),
    ({"response_format": {"type": "json_object"}}, "what is sampled is not constrained"),
    ({"functions": [FUNCTION]}, "the old form of tools: send tools"),
    ({"guided_regex": "a"}, r"guided_regex=a: not known here.*leave it out"),
    ({"continue_final_message": True}, "continues none that was begun for it: end the messages"),
    (
        {"messages": [USER, {"role": "assistant", "content": "It", "prefix": True}]},
        "prefix of a message: the student samples whole turns",
    ),
    ({"moderation": {"model": "m"}}, "nothing is moderated here: leave it out"),
    ({"tool_choice": "all"}, "tool_choice=all: expected auto"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\]=.*no tool runs here"),
    ({"tools": {"add": 1}}, "tools={'add': 1}: expected a list"),
    ({"max_tokens": 0}, "max_tokens=0: expected a whole number from 1 up"),
    ({"max_completion_tokens": True}, "max_completion_tokens=True: expected a whole"),
    ({"stop": ["a", ""]}, r"stop=\['a', ''\]: expected a text"),
    ({"messages": []}, r"messages=\[\]: expected a list of at least one"),
    ({"messages": ["1+1?"]}, r"messages\[0\] is '1\+1\?'; write \{role"),
    ({"messages": [USER, {"role": "critic"}]}, r"messages\[1\]: role 'critic'; expected one"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        r"messages\[0\]: content has a part .*image_url.*only parts of text are read",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, 1]}]},
        r"messages\[0\]: tool call 1; write \{function",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "["}}]}]},
        "the arguments as an object or its JSON text",
    ),
]  # fields, message


def test_what_cannot_be_given_is_refused():
    for fields, message in NOT_GIVEN:
        with pytest.raises(RequestError, match=message) as caught:
            read(**fields)
        assert caught.value.status == 400


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 10**6, b'{"messages": '])
def test_other_bodies_are_refused(body):
    with pytest.raises(RequestError, match="the body is") as caught:
        read_request(body)
    assert caught.value.status == 400


def test_arguments_nested_too_deep_are_refused():
    function = {"name": "f", "arguments": '{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"}
    with pytest.raises(RequestError, match="nested too deep"):
        read(messages=[{"role": "assistant", "tool_calls": [{"function": function}]}])


def test_a_reply_is_written_whole_and_as_events():
    call = ToolCall("abcdefghi", "add", {"x": "é", "y": [1]})
    reply = ChatReply("Wait.", "Hm.", (call,), "tool_calls", prompt_tokens=5, completion_tokens=3)
    body = openai_api.completion(reply, Form("m"), "1")
    (choice,) = body["choices"]
    function = {"name": "add", "arguments": '{"x": "é", "y": [1]}'}
    calls = [{"id": "abcdefghi", "type": "function", "function": function}]
    said = {"content": "Wait.", "reasoning_content": "Hm.", "tool_calls": calls}
    assert choice["message"] == {"role": "assistant", "refusal": None, **said}
    assert choice["finish_reason"] == "tool_calls"
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert body["usage"] == usage
    *parts, last = openai_api.chunks(reply, Form("m", True, True), "1")
    assert (last["choices"], last["usage"]) == ([], usage)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm."},
        {"content": "Wait."},
        {"tool_calls": [{"index": 0, **calls[0]}]},
        {},
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * 4 + ["tool_calls"]
    assert (
        openai_api.completion(ChatReply("", calls=(call,)), Form(), "1")["choices"][0]["message"][
            "content"
        ]
        is None
    )


def test_errors_have_the_form_that_clients_know():
    error = openai_api.error_body(context_full(99, 64))["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert openai_api.error_body(RequestError(503, "busy", ""))["error"]["type"] == "server_error"
