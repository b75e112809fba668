"""What 256 agents at once cost the trainer's main thread.

    python -m benchmarks.agents
    python -m benchmarks.agents --smoke   # a few short turns: does it run?

The agents are connections of one process, each of which sends its growing history four times and
then returns (agent_players.py); the pool's threads start no process. Stand-ins for SGLang servers
reply after a delay (control_plane.py). The rest is the trainer's own: sessions, histories, chat
template, dispatcher, and the process that talks to servers and agents. Not measured: what the
processes of agents cost.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.control_plane import Servers, child_seconds, lost_share
from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.agents import AgentPool, Notes
from stable_opd_mcore.rollout.environment_worker import Answer
from stable_opd_mcore.rollout.episodes import Episode
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.rollout.sglang.dispatch import Dispatcher
from stable_opd_mcore.rollout.sglang.event_log import EventLog
from stable_opd_mcore.rollout.sglang.fleet import Fleet, Member
from stable_opd_mcore.rollout.sglang.prompt_requests import PromptRequests
from stable_opd_mcore.serving.client import SglangClient
from stable_opd_mcore.serving.http_process import HTTP
from stable_opd_mcore.serving.requests import Generation
from tests.commands.check.directories import write_model

BYTES, VOCABULARY = 256, 272  # of the tokenizer: what the student says, and what it reads
WINDOW = 16_384


@dataclass(frozen=True)
class Size:
    """What is measured."""

    agents: int
    turns: int  # of each
    tokens: int  # of each turn
    spread: float  # seconds within which a turn is sampled


FULL, SMOKE = Size(256, 4, 512, 20.0), Size(4, 2, 32, 0.1)


class Players(AgentPool):
    """Agents that run in one process of this benchmark."""

    def __init__(self, turns: int, *arguments: Any) -> None:
        command = [sys.executable, Path(__file__).with_name("agent_players.py"), str(turns)]
        self._players = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._returned_from: dict[int, threading.Event] = {}
        self._telling = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        super().__init__(*arguments)

    def _read(self) -> None:
        assert self._players.stdout is not None
        for line in self._players.stdout:
            self._returned_from[int(line)].set()

    def shutdown(self) -> None:
        super().shutdown()
        self._players.kill()
        self._players.wait()

    def _play(self, number: int) -> None:
        while (session := self._waiting.get()) is not None:
            session.clock.set(runs=True, anew=True)
            ended = self._returned_from[session.number] = threading.Event()
            assert self._players.stdin is not None
            with self._telling:
                print(session.number, f"{self._url}/{session.secret}/v1", file=self._players.stdin)
                self._players.stdin.flush()
            ended.wait()
            self.post(session.returned, Answer(reward=1.0))


def interaction(folder: Path, size: Size) -> Interaction:
    file = folder / "agent.py"
    file.write_text("def episode(row, seed, base_url):\n    return 1.0\n")
    settings = EnvironmentConfig(
        function=f"{file}:episode", max_turns=size.turns + 1, workers=size.agents
    )
    tokenizer = Tokenizer.load(write_model(folder / "model"))
    HTTP.use_tokenizer(tokenizer.json_text)
    found = Interaction({"": settings}, tokenizer, tokenizer, window=WINDOW)
    students = found._student(settings, True), found._student(settings, False)
    notes = Notes(lambda *_: None, lambda *_: None)
    found._pools[""] = Players(size.turns, settings, students, notes, {})
    return found


def episodes(
    urls: list[str], size: Size, meanwhile: Callable[[Callable[[], bool]], None]
) -> dict[str, float]:
    """CPU seconds of trainer and child for all agents' episodes.

    Args:
        meanwhile: what the main thread does until its argument returns True.
    """
    sampling = Sampling(max_new_tokens=size.tokens, training_step=0)
    with tempfile.TemporaryDirectory() as name:
        agents = interaction(Path(name), size)
        members = [
            Member(f"server_{n}", SglangClient(url), None, state="ready")
            for n, url in enumerate(urls)
        ]
        fleet = Fleet(members, EventLog(Path(name) / "events.jsonl"))
        dispatcher, child, here = Dispatcher(fleet), child_seconds(), time.process_time()
        began = time.perf_counter()
        jobs = [
            PromptRequests(
                Generation((1,), sampling, VOCABULARY),
                lambda *_: True,
                [Episode.begin(Prompt(f"p:{n}", "", (1,), environment="", columns={}), 0, 0)],
                0,
                WINDOW,
                partial(agents.observe, sampling=sampling, step=0),
            )
            for n in range(size.agents)
        ]
        dispatcher.submit(jobs)
        meanwhile(lambda: all(job.is_done for job in jobs))
        dispatcher.wait(jobs)
        seconds = {"trainer": time.process_time() - here, "child": child_seconds() - child}
        seconds["wall"] = time.perf_counter() - began
        rollouts = [rollout for job in jobs for rollout in job.rollouts]
        assert {len(rollout.token_ids) for rollout in rollouts} == {size.turns * size.tokens}
        assert len(rollouts) == size.agents
        agents.close()
        dispatcher.close()
        fleet.stop()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few short turns")
    size = SMOKE if parser.parse_args().smoke else FULL
    torch.set_num_threads(1)
    turns = size.agents * size.turns
    with Servers(8, size.spread, BYTES) as serving:
        found = episodes(serving.urls, size, lambda _: None)
        for name in ("trainer", "child"):
            print(f"{name}: {1000 * found[name] / turns:.1f} ms of CPU for a turn")
        print(f"{turns} turns of {size.tokens} tokens in {found['wall']:.1f} s")
        lost, seconds = lost_share(partial(episodes, serving.urls, size))
    print(f"main thread, time lost while {size.agents} agents run: {lost:.1%}")
    print(f"for a turn: {1000 * seconds / turns:.1f} ms")


if __name__ == "__main__":
    main()
