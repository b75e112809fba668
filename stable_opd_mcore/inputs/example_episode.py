"""An episode with a fixed text as each turn of the student: a thought and an answer.

    example = play_episode(prompt, settings, tokenizer, system_prompt, window, max_new_tokens)
    example.rollout, example.failure, example.roles

It runs the user's function in a process of its own, as training does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.messages import THOUGHT
from stable_opd_mcore.data.thoughts import golden_response
from stable_opd_mcore.data.written_turns import WrittenTurns
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.errors import DataError
from stable_opd_mcore.inputs.pair import EXAMPLE
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.agent_account import account_text
from stable_opd_mcore.rollout.episodes import Episode
from stable_opd_mcore.rollout.interaction import Interaction

_SECONDS = 60.0  # then the student gets no further turn


@dataclass(frozen=True)
class Example:
    """An episode. It is open if it took too long."""

    function: str  # of the environment
    rollout: Rollout
    roles: frozenset[str]  # of the messages that continued a context
    failure: str | None  # why the environment failed; None: it did not
    setting: str = "data.train"  # or data.eval, which has the row
    first_rewritten: str = ""  # what is wrong with the first request that was rewritten

    def of(self, setting: str) -> Example:
        """The same, of a row of this setting."""
        return replace(self, setting=setting)

    def line(self) -> str:
        """How many turns and tokens it had, and what ended it."""
        rollout = self.rollout
        ending = {
            Ending.STOP: f"returned {rollout.reward}",
            Ending.TURNS: "cut by environment.max_turns",
            Ending.WINDOW: "cut where the window is full",
            Ending.OPEN: f"cut after {_SECONDS:.0f} s",
        }.get(rollout.finish_reason, str(rollout.finish_reason))
        turns = [turn for turn in rollout.turns if turn.num_tokens]
        observed = sum(len(turn.before) for turn in turns)
        contexts = 1 + sum(turn.restarts for turn in rollout.turns[1:])
        account = f"; {contexts} contexts, {account_text(rollout.account)}"
        return (
            f"environment  {self.function}, {self.setting} row "
            f"{rollout.prompt.prompt_id}: {len(turns)} turns, {len(rollout.token_ids)} sampled "
            f"and {observed} observed tokens; {ending}{account if rollout.account else ''}"
        )


def example_turn(tokenizer: Tokenizer) -> str:
    """What the student might say: a thought, where its chat template or its tokenizer has marks or
    a channel for one, and an answer."""
    turn = {"role": "assistant", "content": EXAMPLE}
    if tokenizer.has_template and tokenizer.form.has_thoughts:
        turn[THOUGHT] = EXAMPLE
    return WrittenTurns(tokenizer).said(turn)


def play_episode(
    prompt: Prompt,
    settings: EnvironmentConfig,
    tokenizer: Tokenizer,
    system_prompt: str | None,
    window: int,
    max_new_tokens: int,
) -> Example:
    """The prompt's episode.

    Raises:
        UserError: the user's file fails as it is imported, or the chat template cannot write what
            the environment yields.
    """
    settings = settings.model_copy(update={"workers": 1})
    environments = {str(prompt.environment): settings}
    interaction = Interaction(environments, tokenizer, tokenizer, system_prompt, window)
    text = golden_response(example_turn(tokenizer), "".join(tokenizer.pieces(prompt.token_ids)))
    whole = np.array([*tokenizer.encode(text), tokenizer.stop_token_ids[0]], np.int32)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    episode, end = Episode.begin(prompt, 0, 0), time.monotonic() + _SECONDS
    try:
        while not episode.is_ended and time.monotonic() < end:
            if episode.is_open:
                said = whole[: episode.budget(sampling, window)]
                reason = Ending.STOP if len(said) == len(whole) else Ending.LENGTH
                no_logprobs = np.zeros(len(said), np.float32)
                episode = episode.with_tokens(said, no_logprobs, reason, 0, text=text)
            else:
                episode = episode.after(interaction.observe(episode, sampling, 0).result())
    finally:
        interaction.close()
    if interaction.refusal is not None:
        raise DataError(interaction.refusal)
    return Example(
        str(settings.function),
        episode.rollout(),
        frozenset(interaction.roles),
        interaction.first_failure,
        first_rewritten=interaction.first_rewritten(),
    )
