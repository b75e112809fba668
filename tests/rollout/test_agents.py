"""Agents in their own processes, over HTTP: turns, retries, limits and what fails."""

import json
import re
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.metrics import Sum
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.agent_account import num_repeated
from stable_opd_mcore.rollout.episodes import Episode
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.serving.http_process import HTTP
from tests.data.real_tokenizers import QWEN25, real_tokenizer

FILE = '''
import json, os, socket, subprocess, sys, threading, time, urllib.error, urllib.request
from pathlib import Path


def post(url, messages, headers=(), timeout=100, path="chat/completions", **more):
    body = json.dumps({"model": "student", "messages": messages, **more}).encode()
    headers = {"content-type": "application/json", **dict(headers)}
    request = urllib.request.Request(f"{url}/{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def user(text):
    return {"role": "user", "content": text}


def say(url, messages, **more):
    found = post(url, messages, **more)
    return found["choices"][0]["message"]["content"]


def talk(row, seed, base_url):
    """Reports what it got as the reward's metrics and in a file."""
    got = [post(base_url, [user("1+1?")], **each) for each in row["requests"]]
    Path(row["file"]).write_text(json.dumps(got))
    return 0.5, {"seed": seed}


def parallel(row, seed, base_url):
    threading.stack_size(2**18)  # a thousand fit into memory_gib
    got, threads = [], []
    def ask(number):
        got.append(say(base_url, [user(str(number))]))
    for number in range(row["number"]):
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    Path(row["file"]).write_text(json.dumps(got))
    return 1


def impatient(row, seed, base_url):
    """Hangs up before the reply, and asks again when the row's folder says so."""
    folder = Path(row["folder"])
    try:
        say(base_url, [user("1+1?")], timeout=0.5)
        return 0
    except OSError as error:  # a time-out, or the server has gone
        (folder / "gone").write_text(repr(error))
    while not (folder / "go").exists():
        time.sleep(0.02)
    while True:
        try:
            (folder / "got").write_text(say(base_url, [user("1+1?")], headers=row["again"]))
            return say(base_url, [user("The end")]) and 1
        except urllib.error.URLError:
            time.sleep(0.1)


def long_history(row, seed, base_url):
    messages = [user("x " * 600)]
    code, error = post(base_url, messages)
    assert (code, error["code"]) == (400, "context_length_exceeded"), error
    said = say(base_url, messages[:0] + [user("A summary.")])
    return float(said == "turn 0")


def endless(row, seed, base_url):
    Path(row["file"]).write_text(base_url)
    messages = [user("1+1?")]
    while True:
        said = say(base_url, messages)
        messages += [{"role": "assistant", "content": said}, user("Go on.")]


async def awaited(row, seed, base_url):
    return float(say(base_url, [user("1+1?")]) == "turn 0")


def forking(row, seed, base_url):
    if child := os.fork():
        os.waitpid(child, 0)
        return say(base_url, [user("of the parent")]) == "turn 1"
    return say(base_url, [user("of its copy")]) == "never"


def silent(row, seed, base_url):
    return 1


def failing(row, seed, base_url):
    """Fails as the row says, after a turn; with `once` only the first time."""
    say(base_url, [user("1+1?")])
    subprocess.Popen(["sleep", "1000"])
    if row.get("once"):
        marker = Path(row["once"])
        if marker.exists():
            return 1
        marker.write_text("")
    how = row["how"]
    if how == "raise":
        print("a hint", file=sys.stderr)
        raise KeyError("door")
    if how == "exit":
        print("out of cheese", file=sys.stderr, flush=True)
        os._exit(7)
    if how == "memory":
        bytearray(2**40)
    if how == "sleep":
        print("sleeps", file=sys.stderr, flush=True)
        time.sleep(1000)
    if how == "refused":
        reply = post(base_url, [user("1+1?")], n=2)
        raise ValueError(str(reply))
    return "good"
'''
TRAINING = Sampling(max_new_tokens=40, training_step=0)
WINDOW = 500


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return real_tokenizer(QWEN25)


@pytest.fixture
def interact(tmp_path, tokenizer, request):
    (tmp_path / "agent.py").write_text(FILE)

    def build(name: str, **settings: Any) -> Interaction:
        given = {"workers": 1, "timeout_seconds": 100.0} | settings
        config = EnvironmentConfig(function=f"{tmp_path / 'agent.py'}:{name}", **given)
        built = Interaction({"": config}, tokenizer, tokenizer, None, WINDOW)
        request.addfinalizer(built.close)
        return built

    return build


def play(
    interaction: Interaction,
    tokenizer: Tokenizer,
    row: dict[str, Any],
    said: Any = lambda number: f"turn {number}",
    sample: int = 0,
) -> Episode:
    """An episode whose turns are given texts, cut at the limit of each turn."""
    ids = tuple(tokenizer.encode(tokenizer.render_turns([{"role": "user", "content": "row"}])))
    prompt = Prompt("s:1", "row", ids, columns=row, environment="")
    episode = Episode.begin(prompt, sample, 0)
    number = 0
    while not episode.is_ended:
        if not episode.is_open:
            answer: Future = interaction.observe(episode, TRAINING, 3)
            episode = episode.after(answer.result(240))
            continue
        text = said(number)
        whole = [*tokenizer.encode(text), tokenizer.stop_token_ids[0]]
        given = np.array(whole[: episode.budget(TRAINING, WINDOW)], np.int32)
        reason = Ending.STOP if len(given) == len(whole) else Ending.LENGTH
        text = tokenizer.decode(given.tolist()) if reason == Ending.LENGTH else text
        logprobs = np.zeros(len(given), np.float32)
        episode = episode.with_tokens(given, logprobs, reason, 0, text=text)
        number += 1
    return episode


def counts(interaction: Interaction) -> dict[str, float]:
    taken = interaction.take_metrics()
    names = {name: each.total for name, each in taken.items() if isinstance(each, Sum)}
    return {name.removeprefix("environment/"): total for name, total in names.items() if total}


def test_a_request_is_a_turn_and_its_limits_cut_it(interact, tokenizer, tmp_path):
    requests = [{}, {"max_tokens": 3}, {"stop": ["STOP", "never"]}, {"n": 2}]
    requests.append({"stream": False, "tool_choice": "required"})
    row = {"file": str(tmp_path / "got"), "requests": requests}
    interaction = interact("talk")
    texts = ["Two.", "One and one are two.", "Two! STOP and more", "Again."]
    episode = play(interaction, tokenizer, row, said=lambda number: texts[number])
    rollout = episode.rollout()
    assert (rollout.reward, rollout.finish_reason) == (0.5, "stop")
    assert list(rollout.metrics) == ["seed"]
    replies = json.loads((tmp_path / "got").read_text())
    choices = [each["choices"][0] for each in replies[:3] + replies[4:]]
    cut = tokenizer.decode(tokenizer.encode(texts[1])[:3])
    assert [each["message"]["content"].strip() for each in choices] == [
        *("Two.", cut.strip(), "Two!", "Again.")
    ]
    assert [each["finish_reason"] for each in choices] == ["stop", "length", "stop", "stop"]
    assert replies[3][0] == 400
    turns = rollout.turns
    assert [turn.finish_reason for turn in turns] == ["stop", "length", "stop", "stop"]
    assert turns[1].num_tokens == 3
    assert turns[2].text.startswith("Two! STOP")
    kept = tokenizer.encode(texts[2])
    assert turns[2].num_tokens == len(tokenizer.encode("Two! STOP")) < len(kept)
    for reply, turn in zip(choices, turns, strict=True):
        assert reply["message"]["role"] == "assistant"
        usage = replies[[*turns].index(turn) + (turn is turns[3])]["usage"]
        assert usage["completion_tokens"] == turn.num_tokens
        assert usage["prompt_tokens"] == len(turns[0].before)
    counted = {"begun": 4, "forced_calls": 1, "refused_requests": 1}
    counted["stop_cut_tokens"] = num_cut = len(kept) + 1 - turns[2].num_tokens
    assert counts(interaction) == counted
    num_trained, num_read = len(rollout.token_ids), 4 * len(turns[0].before)
    assert rollout.account == {
        **counted,
        "sampled_tokens": num_trained + num_cut,
        "trained_tokens": num_trained,
        "context_tokens": num_read + num_trained,
        "repeated_tokens": num_repeated(episode.contexts),
    }
    assert num_repeated(episode.contexts) >= num_read * 3 / 4


def test_anthropics_reply_says_which_text_ended_it(interact, tokenizer, tmp_path):
    asked = {"path": "messages", "stop_sequences": ["never", "STOP"]}
    row = {"file": str(tmp_path / "got"), "requests": [asked]}
    play(interact("talk"), tokenizer, row, said=lambda _: "Two! STOP and more")
    (reply,) = json.loads((tmp_path / "got").read_text())
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    assert reply["content"] == [{"type": "text", "text": "Two! "}]


def test_of_a_thousand_requests_at_once_as_many_get_a_turn_as_may(interact, tokenizer, tmp_path):
    interaction = interact("parallel", max_turns=5)
    row = {"file": str(tmp_path / "got"), "number": 1000}
    episode = play(interaction, tokenizer, row)
    assert (episode.finish_reason, len(episode.turns), len(episode.contexts)) == ("turns", 5, 5)
    assert not (tmp_path / "got").exists()  # its process was killed


def test_parallel_requests_get_one_turn_each(interact, tokenizer, tmp_path):
    row = {"file": str(tmp_path / "got"), "number": 12}
    interaction = interact("parallel", max_turns=20)
    episode = play(interaction, tokenizer, row)
    assert sorted(json.loads((tmp_path / "got").read_text())) == sorted(
        f"turn {n}" for n in range(12)
    )
    assert len(episode.contexts) == len(episode.rollout().turns) == 12


@pytest.mark.parametrize(
    ("again", "early", "sends"),
    [
        ({"x-stainless-retry-count": "1"}, True, None),  # while its turn is sampled
        ({}, True, None),  # the same, without the mark: its client has gone
        ({}, False, None),  # after its turn, which nobody has read
        ({}, False, signal.SIGKILL),
        ({}, False, signal.SIGSTOP),
    ],
)
def test_a_retry_gets_the_turn_that_was_sampled_for_it(
    interact, tokenizer, tmp_path, again, early, sends
):
    """sends: what the process that takes requests gets meanwhile. It starts again at the same port,
    or has the turn before it can notice that the client has gone."""
    interaction = interact("impatient")

    def said(number: int) -> str:
        if number == 0:
            process = HTTP._process
            assert process is not None
            if sends is not None:
                process.send_signal(sends)
            while not (tmp_path / "gone").exists():
                time.sleep(0.02)
            if early:
                (tmp_path / "go").touch()
            if sends == signal.SIGSTOP:
                threading.Timer(0.5, process.send_signal, (signal.SIGCONT,)).start()
            else:
                time.sleep(1.5)  # until the server has noticed that the client has gone
            if not early:
                threading.Timer(1.0, (tmp_path / "go").touch).start()
        return f"turn {number}"

    row = {"folder": str(tmp_path), "again": again}
    episode = play(interaction, tokenizer, row, said)
    assert episode.reward == 1
    assert (tmp_path / "got").read_text() == "turn 0"
    assert [turn.text for turn in episode.turns] == ["turn 0", "turn 1"]
    assert counts(interaction) == {"begun": 2, "retries": 1}


def test_a_full_window_is_an_error_that_the_agent_can_answer(interact, tokenizer):
    interaction = interact("long_history")
    assert play(interaction, tokenizer, {}).reward == 1
    assert counts(interaction) == {"begun": 1, "refused_requests": 1}


def test_an_episode_ends_at_its_most_turns_and_its_url_with_it(interact, tokenizer, tmp_path):
    interaction, row = interact("endless", max_turns=3), {"file": str(tmp_path / "url")}
    episode = play(interaction, tokenizer, row)
    assert (episode.finish_reason, episode.reward, len(episode.turns)) == ("turns", 0, 3)
    assert len(episode.contexts) == 1
    url = (tmp_path / "url").read_text()
    assert play(interaction, tokenizer, row, sample=1).finish_reason == "turns"
    assert counts(interaction)["continued"] == 4
    body = {"messages": [{"role": "user", "content": "1+1?"}]}
    for of, status in ((url, 410), (url[:-4] + "/v1", 404)):  # of this one, of none
        assert httpx.post(f"{of}/chat/completions", json=body).status_code == status


@pytest.mark.parametrize("name", ["awaited", "forking"])
def test_an_agent_may_be_a_coroutine_or_fork_itself(interact, tokenizer, name):
    assert play(interact(name), tokenizer, {}).reward == 1


@pytest.mark.parametrize(
    ("how", "failure", "reason"),
    [
        (
            "raise",
            "crash",
            r"KeyError: 'door' \(.*agent.py, line \d+\); it printed at last:\na hint",
        ),
        ("exit", "crash", "exit code 7; it printed at last:\nout of cheese"),
        ("memory", "crash", r"more memory than environment.memory_gib=4"),
        ("sleep", "timeout", "environment.timeout_seconds=6; it printed at last:\nsleeps"),
        ("return", "invalid", "the episode returned 'good'"),
        ("refused", "crash", "n=2: one turn is sampled"),
    ],
)
def test_what_fails_is_tried_once_more_and_says_why(interact, tokenizer, how, failure, reason):
    interaction = interact("failing", timeout_seconds=6.0)
    episode = play(interaction, tokenizer, {"how": how})
    assert (episode.finish_reason, episode.failure, episode.reward) == ("failed", failure, 0)
    assert interaction.first_failure is not None
    assert re.search(reason, interaction.first_failure), interaction.first_failure


def test_a_second_attempt_is_the_episode(interact, tokenizer, tmp_path):
    interaction = interact("failing", timeout_seconds=6.0)
    row = {"how": "sleep", "once": str(tmp_path / "once")}
    episode = play(interaction, tokenizer, row)
    assert (episode.finish_reason, episode.reward, len(episode.turns)) == ("stop", 1, 1)
    assert interaction.first_failure is None
    assert "sampled_tokens" in episode.account
    assert interaction.take_metrics()["environment/trained_share"].value() == 0.5


def test_an_agent_that_calls_nobody_is_invalid(interact, tokenizer):
    interaction = interact("silent")
    assert play(interaction, tokenizer, {}).failure == "invalid"
    assert "without a request" in str(interaction.first_failure)


def test_a_file_that_fails_ends_the_run(interact, tokenizer, tmp_path):
    interaction = interact("silent")
    pool = interaction._pool("")
    pool._function = replace(pool._function, source=b"raise KeyError('door')")
    with pytest.raises(UserError, match="fix the error above"):
        play(interaction, tokenizer, {})
