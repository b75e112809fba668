"""Rollouts of a stored run, read step by step instead of sampled.

With the same rollouts, two layouts, versions or objectives can be compared number by number. Stored
responses and log-probabilities are returned unchanged; this run's student samples nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stable_opd_mcore.config.changes import changes, read_settings
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.run_directory import ANY_STEP, RunDirectory
from stable_opd_mcore.records import Prompt, Rollout, Sampling
from stable_opd_mcore.rollout.engine import RolloutEngine

_SETTINGS_OF_STORED = (  # what stored rollouts depend on
    "train.seed",
    "rollout.prompts_per_step",
    "sampling.temperature",
    "sampling.max_new_tokens",
    "student.stop_token_ids",
)


class ReplayEngine(RolloutEngine):
    """A `RolloutEngine` over the files of a run that was stored with rollout.save=all, in which
    `rollouts/step_000012.jsonl` holds the rollouts of step 12, counted from 1.

    Raises:
        UserError: the run has stored fewer than `num_steps` steps.
    """

    def __init__(self, run_directory: str | Path, num_steps: int = 1):
        self._run_directory = Path(run_directory)
        for step in range(1, num_steps + 1):
            self._stored_path(step)

    def _stored_path(self, step: int) -> Path:
        path = RunDirectory(self._run_directory).rollouts(step)
        if not path.is_file():
            num_stored = len(list(path.parent.glob(f"{ANY_STEP}.jsonl")))
            raise UserError(
                f"{path}: step {step} was not stored; rollout.replay_from must be the directory of "
                "a run with rollout.save=all and at least as many steps as this one (it has "
                f"{num_stored})"
            )
        return path

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
    ) -> list[Rollout]:
        """The stored rollouts of the step after `step` steps, with the caller's prompts (and golden
        solutions); the caller grades them again.

        Raises:
            UserError: not stored, or with other prompts, other prompt tokens or fewer samples.
        """
        path = self._stored_path(step + 1)
        stored: dict[str, dict[int, Rollout]] = {}
        for rollout in read_rollouts(path):
            stored.setdefault(rollout.prompt.prompt_id, {})[rollout.sample_index] = rollout
        return [
            replace(_stored_sample(stored, prompt, sample, path), prompt=prompt)
            for prompt in prompts
            for sample in range(sampling.num_samples)
        ]


def _stored_sample(
    stored: dict[str, dict[int, Rollout]], prompt: Prompt, sample: int, path: Path
) -> Rollout:
    samples = stored.get(prompt.prompt_id)
    if samples is None:
        raise UserError(
            f"{path}: no rollouts of prompt {prompt.prompt_id}; a replay needs the same data, "
            "train.seed and rollout.prompts_per_step as the stored run, and there rollout.save=all"
        )
    if sample not in samples:
        raise UserError(
            f"{path}: prompt {prompt.prompt_id} has {len(samples)} stored samples, sample "
            f"{sample} is missing; set rollout.samples_per_prompt as in the stored run"
        )
    rollout = samples[sample]
    if rollout.prompt.token_ids != prompt.token_ids:
        raise UserError(
            f"{path}: prompt {prompt.prompt_id} was stored with other tokens "
            f"({len(rollout.prompt.token_ids)}, now {len(prompt.token_ids)}); a replay needs the "
            "same tokenizer, chat template and data as the stored run"
        )
    return rollout


def replay_engine(config: Config) -> ReplayEngine:
    """The stored run's rollouts, where it sampled them as this run would.

    Raises:
        UserError: too few steps are stored, or they were sampled with other settings.
    """
    directory = Path(str(config.rollout.replay_from))  # the schema requires it
    engine = ReplayEngine(directory, config.train.steps)
    if RunDirectory(directory).resolved.is_file():
        differ = changes(read_settings(RunDirectory(directory).resolved), config)
        for key in differ.keys() & _SETTINGS_OF_STORED:
            stored, own = differ[key]
            raise UserError(
                f"{key}={own}, but rollout.replay_from={directory} was sampled with {stored}: the "
                "stored log-probabilities and responses are those of that value; set it here too"
            )
    return engine
