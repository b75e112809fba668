"""Messages are compared by what they say."""

import pickle

from stable_opd_mcore.data.chat_api import (
    ChatReply,
    ToolCall,
    context_full,
    same_message,
)


def said(content="", **arguments):
    calls = [{"id": "a", "function": {"name": "add", "arguments": arguments}}] if arguments else []
    return {"role": "assistant", "content": content, "tool_calls": calls}


EQUAL = [
    ({"role": "user", "content": " 1\n"}, {"role": "user", "content": "1"}, True),
    ({"role": "user", "content": "1"}, {"role": "tool", "content": "1"}, False),
    ({"role": "user", "content": "1"}, {"role": "user", "content": "1 1"}, False),
    ({"role": "assistant", "content": None}, said(), True),
    ({**said("1"), "reasoning_content": "Hm."}, said("1"), True),
    (said(x=1, y=[2, {"z": 3, "w": 4}]), said(y=[2.0, {"w": 4, "z": 3}], x=1.0), True),
    (said(x=1), said(x=2), False),
    (said(x=1), said(x=True), False),
    (said(x=1), said(x="1"), False),
    (said(x=1), said(), False),
]  # a, b, same


def test_equal_messages_say_the_same():
    for a, b, same in EQUAL:
        assert same_message(a, b) is same


def test_a_reply_is_the_message_that_a_client_echoes():
    reply = ChatReply("", "Hm.", (ToolCall("abcdefghi", "add", {"x": 1}),), "tool_calls")
    assert same_message(reply.message, {**said(x=1.0), "content": None})
    assert reply.message["content"] is None  # chat templates ask for it next to calls
    assert reply.message["tool_calls"][0]["id"] == "abcdefghi"


def test_errors_pass_from_one_process_to_another():
    copy = pickle.loads(pickle.dumps(context_full(99, 64)))
    assert (copy.status, copy.code) == (400, "context_length_exceeded")
    assert str(copy).startswith("This model's maximum context length is 64 tokens.")
