"""Environments in processes: the order of their steps, failures and replays, and how they end."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future

import psutil
import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.user_code import read_user_function
from stable_opd_mcore.rollout import environment_process, environments
from stable_opd_mcore.rollout.environment_answers import Answer
from stable_opd_mcore.rollout.environments import EnvironmentPool
from tests.processes import wait_until_ended

pytestmark = pytest.mark.slow

FILE = """
import os, signal, time
from pathlib import Path

steps = 0

def count(row, seed):
    "Answers with how often and what the student has said, and ends after row['turns']."
    said, all_said = None, []
    for turn in range(row["turns"]):
        said = yield f"{row['name']} {seed} {turn} {all_said}"
        all_said.append(said + "!" if said.truncated else said)
    return len(all_said) / 10

def unlike(row, seed):
    "Its answers depend on the process."
    said = yield None
    while True:
        said = yield str(os.getpid())

def fail(row, seed):
    "Fails as the student says; if it names a file, only until that file exists."
    said = yield None
    while said != "end":
        how, _, once = said.partition(" ")
        if once and Path(once).exists():
            how = ""
        elif once:
            Path(once).touch()
        if how == "raise":
            raise KeyError("the door")
        if how == "hang":
            while True: pass
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "quit":
            raise SystemExit
        if how == "memory":
            bytearray(2**40)
        said = yield "go on"
    return 1

def is_closed(row, seed):
    try:
        yield None
    finally:
        Path(row["file"]).write_text("closed")
        if row.get("hangs"):
            time.sleep(60)
    return 1

def in_this_process(row, seed):
    global steps
    steps += 1
    if steps > 2:
        raise RuntimeError("broken for good")
    yield None
    return 1
"""


# The same, as asynchronous generators; "block" hangs the event loop of all.
ASYNC = (
    FILE.replace("def ", "async def ")
    .replace("    return ", "    yield ")
    .replace("while True: pass", "await __import__('asyncio').sleep(60)")
    .replace(
        '    if how == "kill"',
        '    if how == "block":\n            while True: pass\n        if how == "kill"',
    )
    + """
async def meet(row, seed):
    import asyncio
    global steps
    yield None
    steps += 1
    while steps < row["number"]:
        await asyncio.sleep(0.01)
    yield "again"
    yield (0.5, {"met": steps})
"""
)


def get(future: Future[Answer | None]) -> Answer | None:
    return future.result(60)


def texts(step: Answer | None) -> list[tuple[str, str]] | None:
    return (
        None
        if step is None or step.observed is None
        else [(m["role"], m["content"]) for m in step.observed]
    )


def processes(pool):
    return [worker._process for worker in pool._workers if worker._process is not None]


def played(pool, key, turns, between=lambda turn: None):
    """All steps of an episode of `count`."""
    steps = [get(pool.open(key, {"turns": turns, "name": str(key)}, 7))]
    for turn in range(turns):
        between(turn)
        steps.append(get(pool.say(key, f"t{turn}", truncated=turn == 1)))
    return steps


def expected_texts(key, turns):
    said = ["t0", "t1!", *(f"t{turn}" for turn in range(2, turns))]
    return [[("user", f"{key} 7 {turn} {said[:turn]}")] for turn in range(turns)]


EXAMPLE = """
class Game:
    def __init__(self, goal, seed): self.goal, self.tries = goal, 0
    def reset(self): return "Guess a number."
    def step(self, said):
        self.tries += 1
        return "higher" if int(said) < self.goal else "lower", 1.0, int(said) == self.goal
    def close(self): ...

make = Game

def episode(row, seed):
    env = make(row["game"], seed)
    try:
        said = yield env.reset()
        while True:
            observation, reward, done = env.step(said)
            if done:
                return float(reward)
            said = yield observation
    finally:
        env.close()
"""


def test_the_example_with_a_small_game(pool_of):
    pool = pool_of(EXAMPLE, "episode")
    assert texts(get(pool.open("a", {"game": 3}, 0))) == [("user", "Guess a number.")]
    assert get(pool.say("a", "1")) == Answer(({"role": "user", "content": "higher"},))
    assert get(pool.say("a", "3")) == Answer(reward=1.0)
    assert pool.take_counts() == Counter(answers=3)
    assert pool.take_counts() == Counter()


def test_many_episodes_over_two_workers_keep_their_order(pool_of):
    pool = pool_of(FILE, "count", workers=2)
    results: dict[int, list[Answer]] = {key: [] for key in range(60)}
    are_done = threading.Event()

    def go_on(key: int, future: Future[Answer | None]) -> None:
        """Called in a worker's thread, as an engine would be."""
        steps = results[key]
        steps.append(future.result())
        if not steps[-1].is_last:
            turn = len(steps) - 1
            again = pool.say(key, f"t{turn}", truncated=turn == 1)
            again.add_done_callback(lambda found: go_on(key, found))
        elif all(found and found[-1].is_last for found in results.values()):
            are_done.set()

    for key in results:
        row = {"turns": 1 + key % 5, "name": str(key)}
        pool.open(key, row, 7).add_done_callback(lambda found, key=key: go_on(key, found))
    assert are_done.wait(60)
    for key, steps in results.items():
        turns = 1 + key % 5
        assert [texts(step) for step in steps[:-1]] == expected_texts(key, turns)
        assert steps[-1] == Answer(reward=turns / 10)
    assert len(processes(pool)) == 2
    assert [worker.num_episodes for worker in pool._workers] == [0, 0]
    assert all(not process.episodes for process in processes(pool))


@pytest.mark.parametrize("killed_before", [0, 1, 2])
def test_a_process_killed_between_steps_costs_no_episode_anything(pool_of, killed_before):
    pool = pool_of(FILE, "count")
    for key in "bc":
        get(pool.open(key, {"turns": 1, "name": key}, 7))

    def kill(turn):
        if turn == killed_before:
            os.kill(processes(pool)[0].pid, signal.SIGKILL)

    steps = played(pool, "a", 3, kill)
    assert [texts(step) for step in steps[:-1]] == expected_texts("a", 3)
    assert steps[-1] == Answer(reward=0.3)
    assert [get(pool.say(key, "t")) for key in "bc"] == [Answer(reward=0.1)] * 2
    assert pool.take_counts() == Counter(answers=8, replays=3)


@pytest.mark.parametrize("source", [FILE, ASYNC], ids=["generator", "async"])
@pytest.mark.parametrize(
    ("how", "failure", "reason"),
    [
        ("raise", "crash", r"KeyError: 'the door' \(.*envs0.py, line 31\)"),
        ("hang", "timeout", "an answer took longer than environment.timeout_seconds=2"),
        ("kill", "crash", r"it ended its process, by signal 9 \(Killed\)"),
        ("quit", "crash", "it ended its process, with exit code 1"),
        ("memory", "crash", "it needed more memory than environment.memory_gib=4"),
    ],
)
def test_an_episode_that_fails_is_played_again_once(
    pool_of, tmp_path, caplog, how, failure, reason, source
):
    pool = pool_of(source, "fail", timeout_seconds=2.0 if how == "hang" else 20.0)
    for key in ("other", "once", "twice"):
        assert get(pool.open(key, {}, 0)) == Answer()
        assert texts(get(pool.say(key, ""))) == [("user", "go on")]
    pool.take_counts()
    found = get(pool.say("once", f"{how} {tmp_path}/once"))
    assert (texts(found), found.failure) == ([("user", "go on")], None)
    assert pool.take_counts()["replays"] == 1
    found = get(pool.say("twice", how))
    assert (found.reward, found.failure) == (0.0, failure)
    assert re.fullmatch(reason, found.reason), found.reason
    assert pool.take_counts()[failure] == 1
    assert get(pool.say("other", "end")).reward == 1
    assert get(pool.say("once", "end")).reward == 1
    with pytest.raises(KeyError):
        pool.say("twice", "")
    (warned,) = caplog.messages
    assert re.search(reason, warned)


def test_asynchronous_episodes_wait_together_and_a_blocked_loop_fails_only_one(
    pool_of, monkeypatch
):
    pool = pool_of(ASYNC, "meet")
    [get(future) for future in [pool.open(key, {"number": 32}, 0) for key in range(32)]]
    found = [get(future) for future in [pool.say(key, "") for key in range(32)]]
    assert {texts(each)[0][1] for each in found} == {"again"}
    assert get(pool.say(0, "")) == Answer(reward=0.5, metrics={"met": 32.0})

    monkeypatch.setattr(environment_process, "_CLOSING_SECONDS", 1.0)
    pool = pool_of(ASYNC, "fail", workers=2, timeout_seconds=2.0)
    [get(future) for future in [pool.open(key, {}, 0) for key in range(6)]]
    saying = [pool.say(key, "block" if key == 3 else "") for key in range(6)]
    found = [get(future) for future in saying]
    assert [each.failure for each in found] == [None] * 3 + ["timeout"] + [None] * 2
    assert {get(pool.say(key, "end")).reward for key in (0, 1, 2, 4, 5)} == {1}


def test_an_error_is_played_again_in_another_process(pool_of):
    """What is broken in one process must not end the episodes that could be played elsewhere."""
    pool = pool_of(FILE, "in_this_process", workers=2)
    assert [get(pool.open(key, {}, 0)) for key in range(3)] == [Answer()] * 3
    broken, other = processes(pool)
    for key in range(3):
        pool.close(key)
    assert get(pool.open("a", {}, 0)) == Answer()
    assert get(pool.open("b", {}, 0)) == Answer()
    assert processes(pool)[0] != broken
    assert processes(pool)[1] == other
    assert get(pool.say("a", "")).reward == get(pool.say("b", "")).reward == 1


def test_an_environment_that_answers_otherwise_begins_anew(pool_of):
    pool = pool_of(FILE, "unlike")
    get(pool.open("a", {}, 0))
    first = get(pool.say("a", "x"))
    os.kill(processes(pool)[0].pid, signal.SIGKILL)
    assert get(pool.say("a", "y")) is None
    assert get(pool.open("a", {}, 0)) == Answer()
    assert texts(get(pool.say("a", "x"))) != texts(first)
    assert pool.take_counts() == Counter(answers=5, replays=1, not_repeatable=1)


def test_failures_of_an_episode_that_begins_anew_count_on(pool_of, tmp_path):
    source = FILE.replace('yield "go on"', "yield str(os.getpid())")
    pool = pool_of(source, "fail")
    for expected in ("not_repeatable", "failure"):
        get(pool.open("a", {}, 0))
        get(pool.say("a", ""))
        found = get(pool.say("a", "kill"))
        assert (found is None) == (expected == "not_repeatable")
    assert (found.reward, found.failure) == (0.0, "crash")


@pytest.mark.parametrize("source", [FILE, ASYNC], ids=["generator", "async"])
def test_closed_episodes_run_their_finally(pool_of, tmp_path, monkeypatch, source):
    monkeypatch.setattr(environment_process, "_CLOSING_SECONDS", 1.0)
    pool = pool_of(source, "is_closed", timeout_seconds=1.0)
    files = [tmp_path / name for name in "abc"]
    for key, file in enumerate(files):
        get(pool.open(key, {"file": str(file), "hangs": key == 1}, 0))
    pool.close(0)
    pool.close(0)  # nothing
    pool.close(1)  # ends the process
    assert get(pool.say(2, "")) == Answer(reward=1.0)
    assert [file.read_text() for file in files] == ["closed"] * 3


def test_processes_are_replaced_after_many_episodes(pool_of, monkeypatch):
    monkeypatch.setattr(environments, "_EPISODES_PER_PROCESS", 2)
    pool = pool_of(FILE, "count")
    get(pool.open("long", {"turns": 1, "name": ""}, 0))
    (first,) = processes(pool)
    for key in range(3):
        played(pool, key, 1)
    assert processes(pool) == [first], "it holds an episode"
    get(pool.say("long", ""))
    played(pool, "a", 1)
    assert processes(pool) != [first]
    assert pool.take_counts()["replays"] == 0


def test_shutdown_ends_all_processes_and_cancels_what_is_asked_for(pool_of, tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "_JOIN_SECONDS", 2.0)
    source = FILE.replace("while True: pass", "__import__('subprocess').run(['sleep', '60'])")
    pool = pool_of(source, "fail", workers=2)
    for key in range(4):
        get(pool.open(key, {}, 0))
    pids = [process.pid for process in processes(pool)]
    hanging = pool.say(0, "hang")
    time.sleep(0.5)
    pids += [child.pid for pid in pids for child in psutil.Process(pid).children()]
    assert len(pids) == 3
    waiting = pool.say(2, "")
    pool.shutdown()
    wait_until_ended(*pids)
    for future in (hanging, waiting, pool.open("late", {}, 0)):
        with pytest.raises(CancelledError):
            get(future)
    pool.shutdown()


def test_each_worker_has_a_file_of_what_its_episodes_print_and_raise(tmp_path):
    path = tmp_path / "envs.py"
    path.write_text(
        "import sys\ndef episode(row, seed):\n    said = yield None\n    print('it said', said)\n"
        "    sys.stderr.write('more\\n')\n    from words import TABLE\n"
        "    return TABLE[said]\n"
    )
    (tmp_path / "words.py").write_text("TABLE = {'1': 1.0}")
    function = read_user_function(f"{path}:episode", ("row", "seed"))
    pool = EnvironmentPool(function, workers=2, logs=tmp_path / "logs" / "rank_0")
    for key, said in enumerate(("1", "2", "3")):
        get(pool.open(key, {}, 0))
        get(pool.say(key, said))
    pool.shutdown()
    files = sorted((tmp_path / "logs").iterdir())
    assert [file.name for file in files] == ["rank_0_worker_0.log", "rank_0_worker_1.log"]
    text = "".join(file.read_text() for file in files)
    assert text.count("it said 1\nmore\n") == 1
    for said in "23":  # each fails twice
        assert text.count(f"it said {said}\n") == text.count(f"KeyError: '{said}'\n") == 2


@pytest.mark.parametrize("source", [FILE, ASYNC], ids=["generator", "async"])
def test_shutdown_closes_generators(pool_of, tmp_path, source):
    pool = pool_of(source, "is_closed")
    get(pool.open("a", {"file": str(tmp_path / "file")}, 0))
    pool.shutdown()
    assert (tmp_path / "file").read_text() == "closed"


def test_a_user_s_file_that_fails_as_it_is_imported_is_an_error(pool_of, capfd):
    """Only in the processes: one that always fails is refused with the settings."""
    source = "import os\nif 'PYTHONHASHSEED' in os.environ: import no_such_module\n" + EXAMPLE
    pool = pool_of(source, "episode")
    with pytest.raises(UserError, match=r"envs0.py: running it fails, .*; fix the error above"):
        get(pool.open("a", {}, 0))
    assert "no_such_module" in capfd.readouterr().err


def test_processes_end_with_the_trainer(tmp_path):
    (tmp_path / "envs.py").write_text(EXAMPLE)
    script = (
        "import time; from stable_opd_mcore.host.user_code import read_user_function\n"
        "from stable_opd_mcore.rollout.environments import EnvironmentPool\n"
        f"function = read_user_function('{tmp_path}/envs.py:episode', ('row', 'seed'))\n"
        "pool = EnvironmentPool(function); pool.open(1, {'game': 2}, 0).result()\n"
        "print(pool._workers[0]._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    wait_until_ended(pid)
