"""Real clients and harnesses at an agent's URL: OpenAI's, Anthropic's, LiteLLM, docs/agents.md.

`make agents` installs them. The turns are scripted, and what each request continues is what a
session would say of it (rollout/histories.py).
"""

import asyncio
import json
import re
from collections import Counter

import numpy as np
import pytest

from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.chat_api import ChatReply, ToolCall, context_full, episode_over
from stable_opd_mcore.rollout.agent_account import KINDS
from stable_opd_mcore.rollout.histories import Histories
from tests.data.real_tokenizers import QWEN3, real_tokenizer
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
} | {"sql_agent": (ROOT / "docs" / "examples" / "sql_agent.py").read_text()}
ROW = {"problem": "What is 17 + 25?", "answer": "42", "query": "SELECT max(age) FROM things"}
PLAY = (
    "import harness, json, sys\n"
    "print('\\nreward', harness.episode(json.loads(sys.argv[1]), 0, sys.argv[2]))"
)


def called(tool, **arguments):
    return ChatReply("", "Hm.", (ToolCall("abcdefghi", tool, arguments),), "tool_calls", 9, 4)


def said(content):
    return ChatReply(content, "", (), "stop", 9, 4)


def fenced(text):
    return said(f"```mswea_bash_command\n{text}\n```")


def code(text):
    return said(f"Thought: add.\n<code>\n{text}\n</code>")


ADDED = [called("add", a=17, b=25), said("It is 42")]
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
ONE_CONTEXT = {"begun": 1, "continued": 1}
HARNESSES = {  # the student's turns, and what becomes of the requests
    "sums": ([said("It is 42")], {"begun": 1}),
    "openai_client": (ADDED, ONE_CONTEXT),
    "agents_sdk": (ADDED, ONE_CONTEXT),
    "lang_graph": (ADDED, ONE_CONTEXT),
    "smol_agents": (
        [code("x = 17 + 25\nprint(x)"), code("final_answer(x)")],
        {"begun": 1, "rewritten": 1},
    ),
    "mini_swe_agent": (
        [called("bash", command="echo 42 > answer.txt"), called("bash", command=SUBMIT)],
        ONE_CONTEXT,
    ),
    "sql_agent": (
        [fenced("SELECT age"), fenced("SELECT max(age) FROM things"), fenced("submit")],
        {"begun": 1, "continued": 2},
    ),
    "verifiers_env": (ADDED, ONE_CONTEXT),
    "anthropic_client": ([said("It is 42")], {"begun": 1}),
}


def test_each_harness_of_the_page_has_a_test():
    assert BLOCKS.keys() == HARNESSES.keys()


@needs_packages
@pytest.mark.parametrize("name", HARNESSES)
def test_every_harness_of_the_page_plays_an_episode(tmp_path, name):
    turns, kinds = HARNESSES[name]
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
    assert becomes_of(requests, turns) == kinds


def becomes_of(requests, turns):
    """How many requests continue a context, begin one, or are rewritten."""
    tokenizer = real_tokenizer(QWEN3)
    bridge = Bridge(tokenizer)
    histories = Histories(bridge, tokenizer.decode, tokenizer.path, ())
    contexts = []
    for request, turn in zip(requests, turns, strict=True):
        seen = histories.observed(request)
        number = len(contexts) if seen.context is None else seen.context
        said_ids = [*tokenizer.encode(bridge.turns.said(turn.message)), bridge.turn_end]
        before = [] if seen.context is None else contexts[number]
        contexts[number : number + 1] = [[*before, *seen.token_ids, *said_ids]]
        histories.said(turn, np.array(contexts[number], np.int32))
    return {kind: histories.counts[kind] for kind in KINDS if histories.counts[kind]}


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
