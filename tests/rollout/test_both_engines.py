"""Both engines play the same greedy episodes with a real environment, and with real agents."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.parallel.world import World
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.embedded import EmbeddedEngine
from stable_opd_mcore.rollout.episodes import Episode
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.rollout.sglang.dispatch import Dispatcher
from stable_opd_mcore.rollout.sglang.prompt_requests import PromptRequests
from stable_opd_mcore.serving.requests import Completion, Generation
from tests.rollout.sglang.abortable_server import fleet_over
from tests.rollout.tiny import WINDOW, build_engine

GAME = """
def episode(row, seed):
    said = yield row["first"]
    for number in range(2):
        text = f"{len(said)}+{number}"
        again = [{"role": "user", "content": text}]
        said = yield {"restart": again} if row["restarts"] and number else text
    return len(said) % 5 / 4
"""
AGENTS = """
import random
from openai import OpenAI


def say(client, messages):
    reply = client.chat.completions.create(model="student", messages=messages)
    return reply.choices[0].message.content


def user(text):
    return {"role": "user", "content": text}


def game(row, seed, base_url):
    client = OpenAI(base_url=base_url, api_key="-")
    messages = [user(row.get("first") or row["problem"])]
    said = say(client, messages)
    for number in range(2):
        new = user(f"{len(said)}+{number}")
        again = row["restarts"] and number
        messages = [new] if again else [*messages, {"role": "assistant", "content": said}, new]
        said = say(client, messages)
    return len(said) % 5 / 4


def tree(row, seed, base_url):
    client, rng = OpenAI(base_url=base_url, api_key="-"), random.Random(seed)
    talks, at = [[user(row.get("first") or row["problem"])]], 0
    for number in range(6):
        talks[at] = [*talks[at], {"role": "assistant", "content": say(client, talks[at])}]
        what, new = rng.choice(["append", "fork", "sub", "return", "compact"]), user(f"{number}+1")
        if what == "fork":
            talks.append([*talks[at][: 2 * rng.randrange(1, len(talks[at]) // 2 + 1)], new])
        elif what == "sub":
            talks.append([new])
        elif what == "compact":
            talks.append([talks[at][0], user("=17"), new])
        else:
            at = rng.randrange(len(talks)) if what == "return" else at
            talks[at] = [*talks[at], new] if talks[at][-1]["role"] == "assistant" else talks[at]
        at = len(talks) - 1 if what in ("fork", "sub", "compact") else at
    return 1
"""
PIECE = 3  # tokens of a reply


@dataclass(eq=False)
class GreedyServer:
    """A client whose server samples what the embedded engine does, a few tokens at a time."""

    engine: EmbeddedEngine
    read: list[tuple[int, ...]]  # what it sampled turns from
    url, api_key = "http://here", None

    def submit(
        self, request: Generation, timeout_seconds: float = 0, delay_seconds: float = 0
    ) -> Future[Completion]:
        left, context = request.sampling.max_new_tokens, tuple(map(int, request.token_ids))
        if not request.num_sampled:
            self.read.append(context)
        asked = replace(request.sampling, max_new_tokens=min(left, PIECE), num_samples=1)
        (piece,) = self.engine.generate([Prompt("s:0", "", context)], asked, step=0)
        reason = "open" if piece.finish_reason == "length" and left > PIECE else None
        turn = [*context[len(context) - request.num_sampled :], *piece.token_ids.tolist()]
        text = self.engine.decode(turn[:-1] if piece.finish_reason == "stop" else turn)
        reply = Future[Completion]()
        said = piece.token_ids, piece.rollout_logprobs, reason or piece.finish_reason
        reply.set_result(Completion(*said, ("0",), 0, text=text))
        return reply


PROMPTS = range(8)
GREEDY = Sampling(0.0, max_new_tokens=7, num_samples=2, stop_token_ids=(4, 9))


def interaction_of(tmp_path: Path, function: str) -> Interaction:
    tokenizer = Tokenizer.load("synthetic")
    (tmp_path / "game.py").write_text(GAME)
    (tmp_path / "agents.py").write_text(AGENTS)
    settings = EnvironmentConfig(function=f"{tmp_path}/{function}", workers=2, timeout_seconds=200)
    return Interaction({"": settings}, tokenizer, tokenizer, None, WINDOW)


def prompts_of(tokenizer: Tokenizer) -> list[Prompt]:
    return [
        Prompt(
            f"s:{number}",
            "",
            tuple(tokenizer.encode(f"{number}+2#")),
            columns={
                "first": f"{number}*3" if number % 2 else None,
                "problem": f"{number}+2",
                "restarts": number > 3,
            },
            environment="",
            slot=number,
        )
        for number in PROMPTS
    ]


def embedded_engine(tiny_path: Path, world: World, interaction: Interaction) -> EmbeddedEngine:
    tokenizer = interaction.tokenizer
    assert tokenizer is not None
    options = {"vocab_size": tokenizer.vocab_size, "interaction": interaction}
    return replace(build_engine(tiny_path, world, **options), decode=tokenizer.decode)


def dispatched(
    tmp_path: Path, embedded: EmbeddedEngine, interaction: Interaction, read: list[tuple[int, ...]]
) -> list[Rollout]:
    """The episodes by a server; `read` gets what each of their turns was sampled from."""
    server = GreedyServer(replace(embedded, interaction=Interaction()), read)
    dispatcher = Dispatcher(fleet_over(tmp_path, server))  # type: ignore[arg-type]
    assert interaction.tokenizer is not None
    requests = [
        PromptRequests(
            Generation(prompt.token_ids, GREEDY, embedded.vocab_size),
            lambda *_: True,
            [Episode.begin(prompt, sample, 0) for sample in range(2)],
            1,
            WINDOW,
            partial(interaction.observe, sampling=GREEDY, step=1),
        )
        for prompt in prompts_of(interaction.tokenizer)
    ]
    dispatcher.submit(requests)
    dispatcher.wait(requests)
    dispatcher.close()
    interaction.close()
    return [rollout for each in requests for rollout in each.rollouts]


def assert_same(found: Sequence[Rollout], expected: Sequence[Rollout]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.rollout_logprobs, theirs.rollout_logprobs, atol=1e-5)
        assert replace(mine, rollout_logprobs=theirs.rollout_logprobs) == theirs


def test_both_engines_play_the_same_greedy_episodes_and_an_agent_plays_them_too(
    tiny_path, world, tmp_path
):
    interaction = interaction_of(tmp_path, "game.py:episode")
    embedded = embedded_engine(tiny_path, world, interaction)
    expected = embedded.generate(prompts_of(interaction.tokenizer), GREEDY, step=1)
    reasons = {turn.finish_reason for one in expected for turn in one.turns}
    assert reasons == {"stop", "length"}
    assert {turn.restarts for one in expected for turn in one.turns[1:]} == {False, True}
    assert {len(one.turns) for one in expected} == {3}
    assert_same(dispatched(tmp_path, embedded, interaction, []), expected)

    agent = interaction_of(tmp_path, "agents.py:game")
    by_agent = embedded_engine(tiny_path, world, agent)
    found = by_agent.generate(prompts_of(agent.tokenizer), GREEDY, step=1)
    agent.close()
    assert all(one.account["trained_tokens"] == len(one.token_ids) for one in found)
    assert_same([replace(one, account={}) for one in found], expected)


def test_each_turn_of_an_agents_tree_is_trained_once_after_what_it_read(tiny_path, world, tmp_path):
    agent = interaction_of(tmp_path, "agents.py:tree")
    embedded = embedded_engine(tiny_path, world, agent)
    expected = embedded.generate(prompts_of(agent.tokenizer), GREEDY, step=1)
    again, read = interaction_of(tmp_path, "agents.py:tree"), []
    agent.close()
    assert_same(dispatched(tmp_path, embedded, again, read), expected)
    assert {one.finish_reason for one in expected} == {"stop"}
    trained = Counter(
        tuple(sample.token_ids[:place].tolist())
        for one in expected
        for sample in rollout_samples([one])
        for place in sample.places[np.diff(sample.turns, prepend=-1) != 0]
    )
    assert trained == Counter(read)
    samples = rollout_samples(expected)
    assert sum(len(one.places) for one in samples) == sum(len(one.token_ids) for one in expected)
    assert len(samples) > 2 * len(expected)
