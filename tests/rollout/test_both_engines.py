"""Both engines play the same greedy episodes with a real environment."""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.records import Prompt, Sampling
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
PIECE = 3  # tokens of a reply


@dataclass(eq=False)
class GreedyServer:
    """A client whose server samples what the embedded engine does, a few tokens at a time."""

    engine: EmbeddedEngine
    url, api_key = "http://here", None

    def submit(
        self, request: Generation, timeout_seconds: float = 0, delay_seconds: float = 0
    ) -> Future[Completion]:
        left, context = request.sampling.max_new_tokens, tuple(map(int, request.token_ids))
        asked = replace(request.sampling, max_new_tokens=min(left, PIECE), num_samples=1)
        (piece,) = self.engine.generate([Prompt("s:0", "", context)], asked, step=0)
        reason = "open" if piece.finish_reason == "length" and left > PIECE else None
        turn = [*context[len(context) - request.num_sampled :], *piece.token_ids.tolist()]
        text = self.engine.decode(turn[:-1] if piece.finish_reason == "stop" else turn)
        reply = Future[Completion]()
        said = piece.token_ids, piece.rollout_logprobs, reason or piece.finish_reason
        reply.set_result(Completion(*said, ("0",), 0, text=text))
        return reply


def test_both_engines_play_the_same_greedy_episodes(tiny_path, world, tmp_path):
    tokenizer = Tokenizer.load("synthetic")
    (tmp_path / "game.py").write_text(GAME)
    settings = EnvironmentConfig(function=f"{tmp_path / 'game.py'}:episode", workers=1)
    interaction = Interaction({"": settings}, tokenizer, tokenizer, None, WINDOW)
    prompts = [
        Prompt(
            f"s:{number}",
            "",
            tuple(tokenizer.encode(f"_{number}+2#")),
            columns={"first": f"{number}*3" if number % 2 else None, "restarts": number > 3},
            environment="",
            slot=number,
        )
        for number in range(8)
    ]
    greedy = Sampling(0.0, max_new_tokens=7, num_samples=2, stop_token_ids=(4, 9))
    options = {"vocab_size": tokenizer.vocab_size, "interaction": interaction}
    embedded = replace(build_engine(tiny_path, world, **options), decode=tokenizer.decode)
    expected = embedded.generate(prompts, greedy, step=1)
    reasons = {turn.finish_reason for one in expected for turn in one.turns}
    assert reasons == {"stop", "length"}
    assert {turn.restarts for one in expected for turn in one.turns[1:]} == {False, True}
    assert {len(one.turns) for one in expected} == {3}

    server = GreedyServer(replace(embedded, interaction=Interaction()))
    dispatcher = Dispatcher(fleet_over(tmp_path, server))  # type: ignore[arg-type]
    requests = [
        PromptRequests(
            Generation(prompt.token_ids, greedy, tokenizer.vocab_size),
            lambda *_: True,
            [Episode.begin(prompt, sample, 0) for sample in range(2)],
            1,
            WINDOW,
            partial(interaction.observe, sampling=greedy, step=1),
        )
        for prompt in prompts
    ]
    dispatcher.submit(requests)
    dispatcher.wait(requests)
    dispatcher.close()
    interaction.close()
    found = [rollout for each in requests for rollout in each.rollouts]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.rollout_logprobs, theirs.rollout_logprobs, atol=1e-5)
        assert replace(mine, rollout_logprobs=theirs.rollout_logprobs) == theirs
