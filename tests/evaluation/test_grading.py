"""Grading: exact brackets, and math-verify in processes that may hang, crash or never start."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from pebble import ProcessPool

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation import grading
from stable_opd_mcore.evaluation.grading import Grader, GradingItem, RewardItem, Verdict
from stable_opd_mcore.host.user_code import read_user_function
from stable_opd_mcore.records import Prompt, Rollout
from tests.real_data import real_data


@pytest.fixture(scope="module")
def grader():
    with Grader(timeout_seconds=20, workers=2) as grader:
        yield grader


def right(grader, items):
    return [verdict.is_right for verdict in grader.grade(items)]


def test_brackets_are_exact_and_need_no_worker():
    items = [
        GradingItem("2+1=3;[3]", "3", "bracket"),
        GradingItem("2+1=3;[13]", "3", "bracket"),
        GradingItem("[3]2+1=3;", "3", "bracket"),
        GradingItem("2+1=3;[3]", "3", "bracket", stopped=False),
    ]
    with Grader() as grader:
        assert right(grader, items) == [True, False, False, False]
        assert grader._pool is None


def test_boxed_answers_keep_their_order(grader):
    items = [
        GradingItem(r"So it is $\boxed{\frac{1}{2}}$.", "0.5"),
        GradingItem(r"So it is $\boxed{\frac{1}{3}}$.", "0.5"),
        GradingItem(r"\boxed{73}", "073"),
        GradingItem(r"\boxed{142}", "142.0"),
        GradingItem(r"\boxed{\$18.90}", r"\$18.90"),
        GradingItem(r"\boxed{(C)}", "C"),
        GradingItem("no idea", "7"),
        GradingItem("", "7"),
        GradingItem("\\boxed{7} \ud800", "7"),
    ]
    expected = [True, False, True, True, True, True, False, False, True]
    assert right(grader, items) == expected
    assert right(grader, items[::-1]) == expected[::-1]
    assert right(grader, []) == []


def test_an_unfinished_thought_has_no_answer(grader):
    items = [
        GradingItem(r"Is it \boxed{2}? Wait", "2", opens_thinking=True),
        GradingItem(r"Is it \boxed{3}?</think>It is \boxed{2}.", "2", opens_thinking=True),
        GradingItem(r"Is it \boxed{2}?</think>It is \boxed{3}.", "2", opens_thinking=True),
        GradingItem(r"<think>Is it \boxed{2}? Wait", "2"),
        GradingItem(r"It is \boxed{2}.", "2"),
    ]
    assert right(grader, items) == [False, True, False, False, True]


def stand_in(response: str, gold: str, _: float) -> bool:
    if response == "hang":
        time.sleep(60)
    if response == "crash":
        os._exit(1)
    return response == gold


def start_stand_in(_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@pytest.fixture
def stand_in_workers(monkeypatch):
    """Workers that grade by equality; returns those that are alive."""
    monkeypatch.setattr(grading, "graded", stand_in)
    monkeypatch.setattr(grading, "start_worker", start_stand_in)
    others = {process.pid for process in multiprocessing.active_children()}
    return lambda: [p for p in multiprocessing.active_children() if p.pid not in others]


def test_hanging_and_crashing_items_are_wrong_and_counted(stand_in_workers):
    words = ["a", "hang", "b", "crash", "c", "hang", "d"]
    began = time.monotonic()
    with Grader(timeout_seconds=1.0, workers=2) as grader:
        verdicts = list(grader.grade(GradingItem(word, word) for word in words))
        failures = {"hang": Verdict(False, "timeout"), "crash": Verdict(False, "crash")}
        assert verdicts == [failures.get(word, Verdict(True)) for word in words]
        assert right(grader, [GradingItem("a", "a")]) == [True]
        assert stand_in_workers()
    assert time.monotonic() - began < 60, "no hang is waited for"
    assert stand_in_workers() == []


@pytest.mark.usefixtures("stand_in_workers")
@pytest.mark.parametrize(("words", "num_taken"), [(["hang", *"abcdefgh"], 9), (["hang"] * 5, 4)])
def test_other_items_are_graded_beside_one_that_hangs(words, num_taken):
    taken = []

    def items():
        for word in words:
            taken.append(word)
            yield GradingItem(word, word)

    with Grader(timeout_seconds=4.0, workers=2) as grader:
        verdicts = grader.grade(items())
        assert next(verdicts) == Verdict(False, "timeout")
        assert len(taken) in (num_taken, num_taken + 1)  # an item each, and as many that wait
        assert [verdict.failure for verdict in verdicts] == [
            "timeout" if word == "hang" else None for word in words[1:]
        ]


@pytest.mark.usefixtures("stand_in_workers")
def test_a_caller_that_stops_asking_leaves_no_worker_busy():
    with Grader(timeout_seconds=30.0, workers=2) as grader:
        verdicts = grader.grade(GradingItem(word, word) for word in ("a", "hang", "b", "hang"))
        assert next(verdicts) == Verdict(True)
        verdicts.close()
        began = time.monotonic()
        assert right(grader, [GradingItem("c", "c")] * 3) == [True] * 3
        assert time.monotonic() - began < 20


def test_a_worker_that_ended_while_idle_costs_nothing(stand_in_workers):
    with Grader(timeout_seconds=30.0, workers=1) as grader:
        assert right(grader, [GradingItem("a", "a")]) == [True]
        (worker,) = stand_in_workers()
        worker.kill()
        worker.join()
        time.sleep(0.5)  # until the pool has seen it
        assert right(grader, [GradingItem("b", "b")] * 2) == [True] * 2


def fail_to_start(_: object) -> None:
    import no_such_module_anywhere  # noqa: F401 # type: ignore[reportMissingImports]


def test_workers_that_cannot_start_are_an_error_with_their_output(monkeypatch, capfd):
    monkeypatch.setattr(grading, "start_worker", fail_to_start)
    with Grader() as grader, pytest.raises(RuntimeError, match="end before they are ready"):
        list(grader.grade([GradingItem("a", "a")]))
    assert "no_such_module_anywhere" in capfd.readouterr().err


REWARDS = """
import os
def reward(row, response):
    if response == "hang":
        while True: pass
    if response == "abort":
        os.abort()
    if response == "quit":
        raise SystemExit
    values = {"half": .5, "true": True, "over": 7, "under": -2, "text": "1", "none": None}
    values["nan"] = float("nan")
    return row["worth"] if response == "row" else values[response]
"""


def rewarded(
    path: Path, texts: list[str], timeout: float = 10
) -> list[tuple[float | None, str | None]]:
    """Rewards and failures by the function `reward` of a file; no row has an answer."""
    prompts = [Prompt(f"s:{i}", "?", (1,), columns={"worth": 0.25}) for i in range(2)]
    of_prompts = [(prompts[text == "other"], text) for text in texts]
    rollouts = [Rollout(each, 0, (5,), (0.0,), "stop", 0, text=text) for each, text in of_prompts]
    function = read_user_function(f"{path}:reward", ("row", "response"))
    with Grader(timeout, rewards={"": function}) as grader:
        return [(r.reward, r.grading_failure) for r in grader.grade_rollouts(rollouts)]


def test_a_user_s_reward_that_fails_costs_its_response(tmp_path, caplog):
    """It is worth no more than the worst response to the same prompt, and 0 to another prompt."""
    (tmp_path / "own.py").write_text(REWARDS)
    expected = {
        "half": (0.5, None),
        "hang": (-2.0, "timeout"),
        "abort": (-2.0, "crash"),
        "true": (1.0, None),
        "raise": (-2.0, "crash"),
        "quit": (-2.0, "crash"),
        "over": (7.0, None),
        "under": (-2.0, None),
        "nan": (-2.0, "invalid"),
        "text": (-2.0, "invalid"),
        "none": (-2.0, "invalid"),
        "other": (0.0, "crash"),
        "row": (0.25, None),
    }
    found = rewarded(tmp_path / "own.py", list(expected), timeout=1.0)
    assert dict(zip(expected, found, strict=True)) == expected
    (warned,) = caplog.messages
    assert "KeyError: 'raise'" in warned


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_user_s_file_that_fails_ends_the_run(is_lost, tmp_path, capfd, monkeypatch):
    """Here only in its own processes: one that always fails is refused with the settings.

    is_lost: the workers end after pebble has seen that they live, before it has the task.
    """

    def check(pool: ProcessPool) -> None:
        check_status(pool)
        while is_lost and pool.active:
            time.sleep(0.05)

    check_status = ProcessPool._check_pool_status
    monkeypatch.setattr(ProcessPool, "_check_pool_status", check)
    (tmp_path / "own.py").write_text(
        "import multiprocessing\n"
        "if multiprocessing.parent_process(): import no_such_module\n"
        "def reward(row, response): ..."
    )
    with pytest.raises(UserError, match=r"own.py: running it fails"):
        rewarded(tmp_path / "own.py", ["a"] * 6)
    assert "no_such_module" in capfd.readouterr().err


def test_an_item_that_a_worker_loses_counts_as_a_crash(tmp_path, monkeypatch):
    """Its worker lacks memory as it gets the item, while another one grades."""
    (tmp_path / "own.py").write_text(
        "import multiprocessing, time\n"
        "from pebble.pool.process import Acknowledgement\n"
        "def reward(row, response): return time.sleep(float(response)) or 1\n"
        "def acknowledged(self, worker, task):\n"
        "    if task == 3: raise MemoryError\n"
        "    made(self, worker, task)\n"
        "made = Acknowledgement.__init__\n"
        "if multiprocessing.parent_process(): Acknowledgement.__init__ = acknowledged"
    )
    function = read_user_function(f"{tmp_path}/own.py:reward", ("row", "response"))
    with Grader(2.0, rewards={"": function}) as grader:

        def verdicts(*responses: str) -> list[Verdict]:
            return list(grader.grade(RewardItem("", {}, response) for response in responses))

        assert verdicts("0") == [Verdict(1)]  # the workers have started
        monkeypatch.setattr(grading, "_START_SECONDS", 0.0)
        assert verdicts("1", "0", "0") == [Verdict(1), Verdict(1), Verdict(0, "crash")]


def test_the_example_of_a_reward():
    """docs/own_code.md: only the format is worth half."""
    path = Path(__file__).parents[2] / "docs/examples/format_reward.py"
    reward = read_user_function(f"{path}:reward", ("row", "response")).load()
    for response, expected in {
        "<think>2+2</think>It is \\boxed{4}.": 1.0,
        "<think>2+2</think>It is \\boxed{5}.": 0.5,
        "<think>2+2</think>4": 0.0,
        "\\boxed{4}": 0.0,
        "<think></think></think>\\boxed{4}": 0.0,
        "<think>a</think>\\boxed{4}\\boxed{4}": 0.0,
    }.items():
        assert reward({"answer": "4"}, response) == expected, response


def test_rollouts_get_rewards_where_there_is_a_gold_answer(grader):
    gold = Prompt("s:1", "1+1", (1,), "2", answer_format="bracket")
    texts = [(gold, "1+1=2;[2]"), (Prompt("s:2", "?", (1,)), "[2]"), (gold, "[3]")]
    rollouts = [Rollout(p, 0, (5,), (0.0,), "stop", 0, text=text) for p, text in texts]
    assert {r.grading_failure for r in grader.grade_rollouts(rollouts)} == {None}
    assert [r.reward for r in grader.grade_rollouts(rollouts)] == [1.0, None, 0.0]


def test_a_loop_of_empty_boxes_is_graded_fast(grader):
    loop = r"It is \boxed{4}. " + r"\boxed{}. " * 3000
    began = time.monotonic()
    assert right(grader, [GradingItem(loop, "4"), GradingItem(loop, "5")]) == [True, False]
    assert time.monotonic() - began < 10


def test_agreement_with_math_verify_on_published_pairs(grader):
    pairs = [json.loads(x) for x in real_data("grader/pairs.jsonl").read_text().splitlines()]
    items = []
    for pair in pairs:
        # Bare pairs are answers that a response would box; the others are whole responses.
        is_bare = pair["kind"] == "answer_pair" and "boxed" not in pair["prediction"]
        text = f"\\boxed{{{pair['prediction']}}}" if is_bare else pair["prediction"]
        items.append(GradingItem(text, pair["gold"]))
    verdicts = list(grader.grade(items))
    differ = [
        pair["id"]
        for pair, verdict in zip(pairs, verdicts, strict=True)
        if verdict.is_right != pair["math_verify"]
    ]
    # "1 000" for 1000 and 10 for \\$10: right in truth, and right here as the gold is a formula.
    assert set(differ) <= {"g0002", "g0297"}
    assert {verdict.failure for verdict in verdicts} == {None}


def test_workers_do_not_load_torch(grader):
    right(grader, [GradingItem(r"\boxed{1}", "1")])
    pid = grader._pool.schedule(os.getpid).result()
    assert pid != os.getpid()
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
