"""Training over two real SGLang servers of one and two tensor ranks, responses from other weights,
and access to the servers. `stable-opd serve` starts the servers once for the whole file.
"""

import itertools
import json
import math
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.sglang.build import build_sglang_engine
from stable_opd_mcore.rollout.sglang.sglang_engine import SglangEngine
from stable_opd_mcore.serving.client import SglangClient
from tests.integration.sglang_tools import (
    ROOT,
    Process,
    events,
    external,
    faulty_proxy,
    group_lives,
    needs_sglang,
    rollouts,
    rows,
    serve,
    servers_of,
    train,
    urls_of,
    wait_until,
)

pytestmark = [needs_sglang, pytest.mark.cluster]
VOCABULARY = 32  # that of configs/smoke_cpu.yaml
PROMPTS = [Prompt(f"test:{i}", "", tuple(range(3 + i, 15 + i))) for i in range(4)]
SAMPLING = Sampling(num_samples=2, max_new_tokens=6)
STOPS = "student.stop_token_ids=[20,21]"  # several, whose probabilities the loss sums
EVERYWHERE = "rollout.sglang.host=0.0.0.0"
OTHER_LOOPBACK = "127.0.0.2"  # reaches what listens everywhere, but not on 127.0.0.1 only


class Pair:
    """Two servers of the smoke student: one listens on loopback, one everywhere."""

    def __init__(self, directory: Path, served: tuple[Process, Process]) -> None:
        self.directory = directory
        self.served = served
        self.urls = [url for process in served for url in urls_of(process)]
        self.key_file = directory / "key"
        self.overrides = (
            *external(*self.urls),
            f"rollout.sglang.api_key_file={self.key_file}",
            STOPS,
        )

    @property
    def key(self) -> str:
        return self.key_file.read_text().strip()

    def num_generated(self) -> list[int]:
        """Requests for responses that each server has answered."""
        logs = [self.directory / name / "sglang/server_0.log" for name in ("one", "two")]
        return [log.read_text().count('"POST /generate ') for log in logs]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    key = f"rollout.sglang.api_key_file={directory / 'key'}"
    with (
        serve(directory, "one", key, "rollout.sglang.tensor=1") as one,
        serve(directory, "two", key, "rollout.sglang.tensor=2", EVERYWHERE) as two,
    ):
        yield Pair(directory, (one, two))


# ---- runs


def test_trainer_and_servers_agree_after_every_sync(tmp_path, pair):
    """Five steps; then the same seed and rollouts through a run without servers."""
    run = train(tmp_path, "served", "train.steps=5", *pair.overrides)
    served = rows(run)
    assert len(served) == 5
    assert max(row["logprob/rollout_gap_max"] for row in served) < 1e-4
    assert min(row["engine/sync_bytes"] for row in served) > 0
    for row in served:  # a server has work only while the trainer waits for it
        assert 1 - row["perf/trainer_waited"] - 1e-3 < row["perf/servers_waited"] < 1
    published = [event["detail"] for event in events(run) if event["event"] == "published"]
    assert published == [f"version {v}" for v in range(6) for _ in range(2)]
    assert min(pair.num_generated()) > 0
    assert not [file for file in _files(run) if pair.key in file.read_text(errors="replace")]

    replaying = ("rollout.engine=replay", f"rollout.replay_from={run}")
    replay = train(tmp_path, "again", "train.steps=5", STOPS, *replaying)
    for ours, theirs in zip(served, rows(replay), strict=True):
        for name in ("loss/total", "grad_norm", "tokens/trained"):
            assert math.isclose(ours[name], theirs[name], rel_tol=1e-6), name
        assert not {"perf/trainer_waited", "perf/servers_waited"} & theirs.keys()


def test_data_parallel_ranks_share_the_servers_one_step_off(tmp_path, pair):
    """Two trainers, a server each; tokens sampled from older weights are cut at the threshold."""
    before = pair.num_generated()
    run = train(
        tmp_path,
        "shared",
        "train.steps=3",
        "rollout.max_staleness=1",
        "rollout.importance_correction=truncated",
        "rollout.importance_threshold=1.01",
        *pair.overrides,
        ranks=2,
    )
    sampled = [after - start for start, after in zip(before, pair.num_generated(), strict=True)]
    probes = 3 * 4  # each of versions 0 to 3: two requests test the cache, one samples
    assert sampled == [3 * 16 + probes] * 2  # half of a step's 32 responses each
    first, second, third = rows(run)
    assert first["importance/cut_share"] == 0
    assert abs(first["importance/weight_mean"] - 1) < 1e-4
    for row in (second, third):  # sampled from the version before
        assert 0 < row["importance/cut_share"] < 1
        assert row["importance/weight_mean"] < 1.01
    assert [len(rollouts(run, step)) for step in (1, 2, 3)] == [32, 32, 32]


def test_ranks_share_one_server_for_rollouts_and_evaluation(tmp_path, pair):
    """Each version is sent once, although both leaders talk to the server."""
    before = sum(pair.num_generated())
    settings = (*external(pair.urls[0]), *pair.overrides[2:])
    evaluation = ("evaluation.every=2", "evaluation.max_new_tokens=8")
    run = train(tmp_path, "one", "train.steps=2", *settings, *evaluation, ranks=2)
    assert max(row["logprob/rollout_gap_max"] for row in rows(run)) < 1e-4
    published = [event["detail"] for event in events(run) if event["event"] == "published"]
    assert published == [f"version {v}" for v in range(3) for _ in range(2)]  # as each leader saw
    probes = 3 * 3  # each of versions 0 to 2: two requests test the cache, one samples
    assert sum(pair.num_generated()) - before == 2 * 32 + 2 * 64 + probes


def test_one_step_off_trains_on_rollouts_one_version_old(tmp_path, pair):
    """The ratio uses the rollouts' own probabilities. What was sampled ahead is sampled again
    after a restart."""
    settings = ("train.steps=3", "checkpoint.every=2", *pair.overrides)
    settings += ("rollout.max_staleness=1",)
    run = train(tmp_path, "ahead", *settings)
    versions = [{row["weight_version"] for row in rollouts(run, step)} for step in (1, 2, 3)]
    assert versions == [{0}, {0}, {1}]
    first, *_ = rows(run)
    assert_as_on_policy(first)

    # interrupted after the checkpoint of step 2, with step 3's rollouts in flight
    shutil.rmtree(run / "checkpoints/step_000003")
    train(tmp_path, "ahead", *settings)
    *_, last = rows(run)
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert {row["weight_version"] for row in rollouts(run, 3)} == {2}
    assert_as_on_policy(last)


def assert_as_on_policy(row: dict[str, Any]) -> None:
    """The step trained the very weights that had sampled its rollouts."""
    gap = row["logprob/teacher"] - row["logprob/student"]
    assert math.isclose(row["advantage/mean"], gap, abs_tol=1e-4)
    assert row["ratio/clip_share"] == 0


GAME = """
import time

def episode(row, seed):
    said = yield None if seed % 2 else "2+1"
    for number in range(4):
        time.sleep(0.2)  # weights are published meanwhile
        if number == seed % 5:
            return 1
        said = yield {"restart": [{"role": "user", "content": "1+1"}]} if number == 2 else said[:9]
    return 0
"""


def test_episodes_go_on_over_publishes(tmp_path, pair):
    """The learning rate is so small that all versions have the trainer's log-probabilities. Two
    ranks that share the servers without a lag train low-rank factors and publish merged weights."""
    (tmp_path / "game.py").write_text(GAME)
    settings = (
        f"environment.function={tmp_path / 'game.py'}:episode",
        "sampling.max_new_tokens=12",
        "optimizer.warmup_steps=0",
        *pair.overrides,
    )
    lags = (
        "optimizer.lr=1e-12",
        "train.steps=6",
        "rollout.max_staleness=2",
        "rollout.partial=true",
    )
    run = train(tmp_path, "lags", *lags, *settings)
    assert max(row["logprob/rollout_gap_max"] for row in rows(run)) < 1e-4
    sampled = [rollout for step in range(3, 7) for rollout in rollouts(run, step)]
    assert {len(rollout.get("turns", [0])) for rollout in sampled} == {1, 2, 3, 4, 5}
    assert {rollout["finish_reason"] for rollout in sampled} == {"stop"}
    assert {rollout["reward"] for rollout in sampled} == {0, 1}
    parts = [rollout.get("segments", []) for rollout in sampled]
    versions = [[part["weight_version"] for part in each] for each in parts]
    assert max(map(len, versions)) == 3
    assert all(each == sorted(set(each)) for each in versions)
    assert sum(row["environment/answers"] for row in rows(run)) > 0
    factors = ("train.steps=3", "optimizer.lr=0.02", "student.lora.rank=4", "kl.beta=0")
    factors += ("rollout.sglang.lora=merged",)
    run = train(tmp_path, "factors", *factors, *settings, ranks=2)
    assert max(row["logprob/rollout_gap_max"] for row in rows(run)) < 1e-4
    assert rows(run)[-1]["grad_norm"] > 0


AGENT = """
import time
from openai import OpenAI


def episode(row, seed, base_url):
    client = OpenAI(base_url=base_url, api_key="-")

    def say(*messages):
        time.sleep(0.2)  # weights are published meanwhile
        reply = client.chat.completions.create(model="student", messages=messages)
        return {"role": "assistant", "content": reply.choices[0].message.content}

    first, new = [{"role": "user", "content": text} for text in ("2+1", "1+1")]
    said = say(first)
    again = say(first, said, new)
    say(first, said, new, again, first)
    say(first, said, first)  # a fork
    say(new)
    return seed % 2
"""


def test_an_agents_contexts_go_on_over_publishes(tmp_path, pair):
    (tmp_path / "agent.py").write_text(AGENT)
    settings = (
        f"environment.function={tmp_path / 'agent.py'}:episode",
        *("environment.workers=4", "environment.timeout_seconds=200"),
        *("sampling.max_new_tokens=12", "optimizer.warmup_steps=0", "optimizer.lr=1e-12"),
        *("train.steps=5", "rollout.max_staleness=2", "rollout.partial=true"),
        *pair.overrides,
    )
    run = train(tmp_path, "agent", *settings)
    assert max(row["logprob/rollout_gap_max"] for row in rows(run)) < 1e-4
    sampled = [rollout for step in range(1, 6) for rollout in rollouts(run, step)]
    assert {rollout["finish_reason"] for rollout in sampled} == {"stop"}
    contexts = {sum(turn["restarts"] for turn in each["turns"][1:]) for each in sampled}
    assert {2} < contexts <= {2, 3, 4}  # more where a turn ended with the second stop token
    versions = [
        {part["weight_version"] for part in rollout.get("segments", [])} for rollout in sampled
    ]
    assert max(map(len, versions)) > 1
    assert sum(row["environment/rewritten"] for row in rows(run)) == 0


def test_metrics_of_rollouts_that_lag_and_outlive_updates(tmp_path, pair):
    """Who waited, and how old the weights were that sampled."""
    ahead, longer = (
        ("rollout.max_staleness=2", "rollout.partial=true"),
        "sampling.max_new_tokens=200",
    )
    without_stops = pair.overrides[:-1]  # responses are twice as long with only one stop id
    run = train(tmp_path, "lagging", "train.steps=6", *ahead, longer, *without_stops)
    found = rows(run)
    for row in found:
        shares = [row[f"perf/staleness_{age}"] for age in range(3)]
        assert math.isclose(sum(shares), 1, abs_tol=1e-6)
        assert "perf/staleness_3" not in row
        assert 0 < row["perf/trainer_waited"] < 1
        assert 0 < row["perf/servers_waited"] < 1
    for age in (1, 2):
        assert any(row[f"perf/staleness_{age}"] > 0 for row in found), "some start early"
    assert any(row["perf/continued_share"] > 0 for row in found), "an update interrupts some"


# ---- answers from other weights


def _engine(directory: Path, world, pair: Pair, url: str, *overrides: str) -> SglangEngine:
    """An engine over `url`, with versions 0 and 1 published."""
    config = load_config(
        ROOT / "configs/smoke_cpu.yaml",
        [
            f"run.directory={directory}",
            "rollout.engine=sglang",
            *external(url),
            f"rollout.sglang.api_key_file={pair.key_file}",
            *overrides,
        ],
    )
    assert config.student.architecture is not None
    architecture = read_architecture(config.student.architecture)
    chunks = build_model(architecture, world, precision="fp32", trainable=False, seed=3)
    engine = build_sglang_engine(config, world, chunks, None, VOCABULARY)
    for version in range(2):
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.mul_(1.1)
        engine.publish(version)
    return engine


def _sampled(engine: SglangEngine, directory: Path) -> tuple[set[int], list[str]]:
    """The versions of rollouts that are sampled ahead, and the events after the publishes."""
    engine.prefetch(PROMPTS, SAMPLING, step=1, weight_version=engine.weight_version)
    sampled = engine.generate(PROMPTS, SAMPLING, step=1)
    assert [rollout.prompt.prompt_id for rollout in sampled] == [f"test:{i // 2}" for i in range(8)]
    happened = [event["event"] for event in events(directory / "smoke_cpu")]
    assert happened[:2] == ["published", "published"]
    return {rollout.weight_version for rollout in sampled}, happened[2:]


DROPPED = ["stale", "published", "resent"]


@pytest.mark.parametrize(
    ("stated", "max_staleness", "versions", "happened"),
    [
        ("0", 0, {1}, DROPPED),
        ("0", 1, {0}, []),
        ("2", 1, {1}, DROPPED),  # newer than this run's weights
        ("default", 1, {1}, DROPPED),  # a restarted external server
    ],
)
def test_a_server_back_with_other_weights_is_given_the_right_ones(
    tmp_path, world, pair, stated, max_staleness, versions, happened
):
    engine = _engine(tmp_path, world, pair, pair.urls[0], f"rollout.max_staleness={max_staleness}")
    client = SglangClient(pair.urls[0], api_key=pair.key)
    stamp = {"new_version": stated, "abort_all_requests": False}
    client.call("POST", "/update_weight_version", stamp)
    sampled, events_after = _sampled(engine, tmp_path)
    assert sampled == versions
    assert list(dict.fromkeys(events_after)) == happened  # a stale answer or several
    assert client.weight_version() == str(max(versions))


@pytest.mark.parametrize(("max_staleness", "versions"), [(0, {1}), (1, {0, 1})])
def test_a_response_from_two_versions(tmp_path, world, pair, max_staleness, versions):
    """It counts as the older version's, and is sampled again if that is too old."""
    mixes = itertools.cycle([False])

    def mixed(body: bytes) -> bytes:
        if not next(mixes):
            return body
        answer = json.loads(body)
        answer["meta_info"]["weight_versions"] = [{"version": "0"}, {"version": "1"}]
        return json.dumps(answer).encode()

    with faulty_proxy(pair.urls[0], change=mixed) as url:
        engine = _engine(tmp_path, world, pair, url, f"rollout.max_staleness={max_staleness}")
        mixes = itertools.chain([True], mixes)  # the first response
        sampled, happened = _sampled(engine, tmp_path)
    assert sampled == versions
    assert happened == ([] if max_staleness else DROPPED)


# ---- access to the servers; the last test ends them


def test_the_key_is_required_from_other_machines(pair):
    on_loopback, everywhere = (httpx.URL(url).port for url in pair.urls)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((OTHER_LOOPBACK, on_loopback), timeout=10)
    reached = f"http://{OTHER_LOOPBACK}:{everywhere}/model_info"
    assert httpx.get(reached, timeout=60).status_code == 401
    headers = {"Authorization": f"Bearer {pair.key}"}
    assert httpx.get(reached, headers=headers, timeout=60).status_code == 200
    written = [file for file in _files(pair.directory) if pair.key in file.read_text()]
    assert written == [pair.key_file]  # not in a log
    assert stat.S_IMODE(pair.key_file.stat().st_mode) == 0o600


def test_servers_end_with_the_command_that_serves_them(pair):
    """One command ends with SIGTERM, the other with SIGKILL."""
    told, killed = pair.served
    (first,), (second,) = servers_of(told.pid), servers_of(killed.pid)
    assert told.end() == 0
    wait_until(lambda: not group_lives(first), "the server ends with SIGTERM to serve", 60)
    assert group_lives(second)
    killed.kill()
    wait_until(lambda: not group_lives(second), "the server ends when serve dies", 60)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]
