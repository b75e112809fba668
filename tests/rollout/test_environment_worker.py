"""What an environment may yield and return, and the process in which it does."""

import re

import psutil
import pytest

from stable_opd_mcore.host.user_code import read_user_function
from stable_opd_mcore.rollout.environment_answers import Answer
from stable_opd_mcore.rollout.environments import EnvironmentPool
from tests.rollout.test_environments import get, processes

FILE = """
import sys

def evaluated(row, seed):
    "Yields and returns what the row says."
    values = [eval(value) for value in row["values"]]
    for value in values[:-1]:
        yield value
    return values[-1]

def plain(row, seed):
    return 1

def text(row, seed):
    yield row["text"] * row["times"]
    return 0

def hashes(row, seed):
    yield str([hash("a"), list({"a", "b", "c", "d"}), "torch" in sys.modules])
    return 0
"""


@pytest.fixture(scope="module")
def evaluated_pool(tmp_path_factory):
    path = tmp_path_factory.mktemp("envs") / "envs.py"
    path.write_text(FILE)
    pool = EnvironmentPool(read_user_function(f"{path}:evaluated", ("row", "seed")), workers=1)
    yield pool
    pool.shutdown()


@pytest.mark.parametrize(
    ("values", "reason", "instead"),
    [
        (["None"], r"returned None; expected its reward, a finite number, or .*: end it with",
         ["1"]),
        (["float('nan')"], r"returned nan \(float\)", ["float(3)"]),
        (["(1, 2)"], r"returned \(1, 2\) \(tuple\)", ["(1, {'a': 2})"]),
        (["(1, {'a b': 1})"], r"the metric 'a b' \(str\): 1 ", ["(1, {'a_b': 1})"]),
        (["(1, {'a': None})"], r"the metric 'a' \(str\): None", ["(1, {'a': 0})"]),
        (["'1'"], r"returned '1' \(str\)", ["1"]),
        (["'a'", "None", "1"], "yielded None; expected a text", ["'a'", "'b'", "1"]),
        (["3", "1"], r"yielded 3 \(int\); expected a text .* or, first, None or", ["'3'", "1"]),
        (["b'a'", "1"], r"yielded b'a' \(bytes\)", ["b'a'.decode()", "1"]),
        (["[]", "1"], "yielded no messages; expected at least one",
         ["[{'role': 'user', 'content': ''}]", "1"]),
        (["{'restart': []}", "1"], "yielded no messages", ["{'restart': 'a'}", "1"]),
        (["{'restart': 'a', 'x': 1}", "1"], r"yielded \{'restart': 'a', 'x': 1\} \(dict\)",
         ["{'restart': 'a'}", "1"]),
        (["['a']", "1"], r"the message 'a' \(str\); expected \{\"role\"",
         ["[{'role': 'user', 'content': 'a'}]", "1"]),
        (["[{'role': 'user'}]", "1"], r"the message \{'role': 'user'\} \(dict\)",
         ["[{'role': 'user', 'content': ''}]", "1"]),
        (["[{'role': 'user', 'content': {'a': 3}}]", "1"],
         "the message {'role': 'user', 'content': {'a': 3}}",
         ["[{'role': 'user', 'content': 3}]", "1"]),
        (["[{'role': 'user', 'content': '', 'name': 'f'}]", "1"], "the message .*name is not read",
         ["[{'role': 'tool', 'content': '', 'name': ''}]", "1"]),
        (["'a'", "[{'role': 'system', 'content': ''}]", "1"],
         r"role 'system' \(str\); expected user or t",
         ["'a'", "[{'role': 'user', 'content': ''}]", "1"]),
        (["[{'role': r, 'content': ''} for r in ('user', 'system')]", "1"],
         "a system message after another; put it first",
         ["[{'role': r, 'content': ''} for r in ('system', 'user')]", "1"]),
        (["'a'", "{'messages': 'a', 'tools': []}", "1"], r"yielded \{'messages': 'a', 'tools'",
         ["{'messages': 'a', 'tools': []}", "1"]),
        (["{'messages': 'a', 'tools': [3]}", "1"], "yielded the tools .*; expected a list of sch",
         ["{'messages': 'a', 'tools': [{'type': 'function', 'function': {'name': 'f'}}]}", "1"]),
        (["[{'role': 'user', 'content': [{'type': 'image_url', 'image_url': 'x'}]}]", "1"],
         "parts of text", ["[{'role': 'user', 'content': [{'type': 'text', 'text': 'x'}]}]", "1"]),
        (["[{'role': [], 'content': ''}]", "1"], "role None; expected one of system, user",
         ["[{'role': 'user', 'content': ''}]", "1"]),
        (["{'restart': [{'role': 'x', 'content': ''}]}", "1"], "role 'x'; expected one of ",
         ["{'restart': [{'role': r, 'content': ''} for r in ('assistant', 'user')]}", "1"]),
        (["['a' * 9**6] and [{'role': 'user', 'content': 'a' * 10**6}] * 40", "1"],
         "40 messages with", ["[{'role': 'user', 'content': 'a'}] * 40", "1"]),
    ],
)  # fmt: skip
def test_what_is_no_observation_and_no_reward_is_invalid(evaluated_pool, values, reason, instead):
    """`instead` has what the reason asks for."""

    def last(values):
        key = str(values)
        step = get(evaluated_pool.open(key, {"values": values}, 0))
        while not step.is_last:
            step = get(evaluated_pool.say(key, ""))
        return step

    step = last(values)
    assert (step.reward, step.failure) == (0.0, "invalid")
    assert re.search(reason, step.reason), step.reason
    assert last(instead).failure is None


def test_texts_messages_and_new_contexts_are_observed(evaluated_pool):
    user = {"role": "user", "content": "a"}
    tool = {"role": "tool", "content": ""}
    values = [
        "None",
        "''",
        "[{'role': 'tool', 'content': ''}, {'role': 'user', 'content': 'a'}]",
        "{'restart': 'a'}",
        "{'restart': ({'role': 'system', 'content': 'a'}, {'role': 'user', 'content': 'a'})}",
        "'\\ud800 \\U0001f600'",
        "True",
    ]
    found = [get(evaluated_pool.open("good", {"values": values}, 0))]
    found += [get(evaluated_pool.say("good", "\ud800")) for _ in values[1:]]
    assert found == [
        Answer(),
        Answer(({"role": "user", "content": ""},)),
        Answer((tool, user)),
        Answer((user,), restarts=True),
        Answer(({"role": "system", "content": "a"}, user), restarts=True),
        Answer(({"role": "user", "content": "? \U0001f600"},)),  # tokenizers refuse half a pair
        Answer(reward=1.0),
    ]


def test_what_other_programs_write_in_messages_rewards_and_metrics_is_read(evaluated_pool):
    """Each is the first thing that an episode yields, or what it returns."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    as_text = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    shots = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": as_text},
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "x"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    read = [*shots]
    read[1] = {"role": "user", "content": "ab"}
    read[2] = {"role": "assistant", "content": None, "tool_calls": calls}
    for number, (yielded, returned, first, last) in enumerate(
        [
            (shots, -2.5, Answer(tuple(read)), Answer(reward=-2.5)),
            (
                {"messages": "d", "tools": tools},
                (7, {"steps": 3, "won": True}),
                Answer(({"role": "user", "content": "d"},), tools=tools),
                Answer(reward=7.0, metrics={"steps": 3.0, "won": 1.0}),
            ),
            (
                {"restart": shots, "tools": tools},
                [0.5, {}],
                Answer(tuple(read), True, tools),
                Answer(reward=0.5),
            ),
        ]
    ):
        values = [repr(yielded), repr(returned)]
        assert get(evaluated_pool.open(number, {"values": values}, 0)) == first
        assert get(evaluated_pool.say(number, "")) == last


def test_a_function_without_yield_says_so(pool_of):
    found = get(pool_of(FILE, "plain").open("a", {}, 0))
    assert found.failure == "invalid"
    assert "returned 1 (int); expected a generator: write `said = yield" in found.reason


def test_a_hundred_megabytes_lose_their_middle_before_they_reach_the_trainer(pool_of):
    pool = pool_of(FILE, "text")
    get(pool.open("warm", {"text": "a", "times": 1}, 0))
    before = psutil.Process().memory_info().rss
    for key in range(3):
        found = get(pool.open(key, {"text": "\U0001f600b", "times": 10**8 // 5}, 0))
        assert found.observed is not None
        content = found.observed[0]["content"]
        assert 999_990 < len(content) <= 1_000_000
        assert content.startswith("\U0001f600b")
        assert content.endswith("b")
        assert "\n[...]\n" in content
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_the_hash_of_a_text_is_the_same_in_each_process(pool_of):
    pool = pool_of(FILE, "hashes", workers=2)
    found = [get(pool.open(key, {}, 0)) for key in range(4)]
    assert len(processes(pool)) == 2
    assert found == [found[0]] * 4
    assert "False" in str(found[0].observed), "the process has no torch"
