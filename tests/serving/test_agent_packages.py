"""Real clients and harnesses at an agent's URL: OpenAI's, Anthropic's, LiteLLM, docs/agents.md.

`make agents` installs them. The turns are scripted. The messages of each request say whether a
harness continues what it sent before.
"""

import asyncio
import json
import re
from collections import Counter
from itertools import pairwise

import pytest

from stable_opd_mcore.data.chat_api import (
    ChatReply,
    ToolCall,
    context_full,
    episode_over,
    same_message,
)
from tests.serving.agent_packages import ROOT, needs_packages, run_python
from tests.serving.agent_url import agent_url

pytestmark = pytest.mark.slow
BLOCKS = {
    name: block
    for block, name in re.findall(
        r"^```python\n(# envs/(\w+)\.py\n.*?)^```",
        (ROOT / "docs" / "agents.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
}
ROW = {"problem": "What is 17 + 25?", "answer": "42"}
PLAY = (
    "import harness, json, sys\n"
    "print('\\nreward', harness.episode(json.loads(sys.argv[1]), 0, sys.argv[2]))"
)


def called(tool, **arguments):
    return ChatReply("", "Hm.", (ToolCall("abcdefghi", tool, arguments),), "tool_calls", 9, 4)


def said(content):
    return ChatReply(content, "", (), "stop", 9, 4)


def code(text):
    return said(f"Thought: add.\n<code>\n{text}\n</code>")


ADDED = [called("add", a=17, b=25), said("It is 42")]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
HARNESSES = {  # the student's turns, and whether each request continues the one before
    "openai_client": (ADDED, True),
    "agents_sdk": (ADDED, True),
    "lang_graph": (ADDED, True),
    "smol_agents": ([code("x = 17 + 25\nprint(x)"), code("final_answer(x)")], False),
    "mini_swe_agent": (
        [called("bash", command="echo 42 > answer.txt"), called("bash", command=SUBMIT)],
        True,
    ),
    "anthropic_client": ([said("It is 42")], True),
}


def test_each_harness_of_the_page_has_a_test():
    assert BLOCKS.keys() == HARNESSES.keys()


@needs_packages
@pytest.mark.parametrize("name", HARNESSES)
def test_every_harness_of_the_page_plays_an_episode(tmp_path, name):
    turns, continues = HARNESSES[name]
    requests = []

    async def answer(secret, request):
        requests.append(request)
        return turns[len(requests) - 1]

    (tmp_path / "harness.py").write_text(BLOCKS[name])
    with agent_url(answer) as base_url:
        printed = run_python("-c", PLAY, json.dumps(ROW), base_url, home=tmp_path)
    assert printed.endswith("\nreward 1.0\n"), printed
    assert len(requests) == len(turns)
    assert not any(request.is_retry for request in requests)
    for turn, (before, after) in zip(turns, pairwise(requests), strict=False):
        history = [*before.messages, turn.message]
        kept = all(map(same_message, history, after.messages))
        assert kept is continues
        assert len(after.messages) > len(history)
        assert not kept or before.tools == after.tools


@needs_packages
def test_clients_read_replies_wait_for_slow_ones_and_know_errors(tmp_path):
    seen = Counter()
    retries = Counter()

    async def answer(secret, request):
        text = request.messages[-1]["content"]
        seen[text] += 1
        retries[text] += request.is_retry
        if text == "wait":  # longer than clients wait for a first byte
            await asyncio.sleep(2)
        elif text == "lost" and not request.is_retry:
            raise RuntimeError("as if the process ended")
        elif text == "full":
            raise context_full(99, 64)
        elif text == "over":
            raise episode_over()
        if text == "call" and request.tools:
            return called("add", x=1)
        return ChatReply(f"{text}!", "Hm.", (), "stop", 9, 4)

    with agent_url(answer, keep_alive_seconds=0.2) as base_url:
        printed = run_python(ROOT / "tests/serving/agent_clients.py", base_url, home=tmp_path)
    call = {"type": "tool_use", "id": "abcdefghi", "name": "add", "input": {"x": 1}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert json.loads(printed.splitlines()[-1]) == {
        "plain": "hi!",
        "thought": "Hm.",
        "call": ["tool_calls", '{"x": 1}'],
        "stream": ["hi!", [], 13],
        "stream_call": ["", ['{"x": 1}'], 13],
        "asynchronous": ["hi!"] * 3,
        "slow": "wait!",
        "slow_stream": "wait!",
        "slow_asynchronous": ["wait!"] * 3,
        "lost": "lost!",
        "full": ["BadRequestError", 400, "context_length_exceeded"],
        "over": ["APIStatusError", 410, "episode_over"],
        "image": ["BadRequestError", 400, "unsupported_content"],
        "responses": ["NotFoundError", 404, "unknown_url"],
        "models": ["student"],
        "lite": "hi!",
        "lite_slow": "wait!",
        "lite_full": "ContextWindowExceededError",
        "claude": "hi!",
        "claude_slow": "wait!",
        "claude_stream": [thought, call],
        "claude_over": ["APIStatusError", 410, None],
    }
    assert (seen["lost"], retries["lost"]) == (2, 1)
    assert (seen["over"], seen["full"]) == (2, 2)  # of two clients: nobody asks again
    assert retries["wait"] == 0
