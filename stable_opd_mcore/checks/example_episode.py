"""The beginning of an episode, with a fixed text in place of the student's turn.

    episode, reason = begin_episode(prompt, settings, tokenizer, system_prompt, window)

It runs the user's function in a process of its own, as training does.
"""

import numpy as np

from stable_opd_mcore.checks.pair import EXAMPLE
from stable_opd_mcore.config.environments import EnvironmentConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.episodes import Episode
from stable_opd_mcore.rollout.interaction import Interaction

_TURNS = 2  # the second has no tokens; it shows what the student reads before it


def begin_episode(
    prompt: Prompt,
    settings: EnvironmentConfig,
    tokenizer: Tokenizer,
    system_prompt: str | None,
    window: int,
) -> tuple[Rollout, str | None]:
    """The beginning of the prompt's episode, and why its environment failed; None if it did not.

    Raises:
        UserError: the user's file fails as it is imported, or the chat template cannot put there
            what an environment yields.
    """
    settings = settings.model_copy(update={"workers": 1})
    environments = {str(prompt.environment): settings}
    interaction = Interaction(environments, tokenizer, tokenizer, system_prompt, window)
    said = np.array([*tokenizer.encode(EXAMPLE), tokenizer.stop_token_ids[0]], np.int32)
    no_logprobs, sampling = np.zeros(len(said), np.float32), Sampling()
    episode = Episode.begin(prompt, 0, 0)
    try:
        while not episode.is_ended and len(episode.turns) < _TURNS:
            if episode.is_open:
                episode = episode.with_tokens(said, no_logprobs, "stop", 0, text=EXAMPLE)
            episode = episode.after(interaction.observe(episode, sampling, 0).result())
        interaction.forget([episode], sampling, 0)
    finally:
        interaction.close()
    return episode.rollout(), interaction.first_failure
