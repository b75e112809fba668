"""Conversations of several turns: what stands between two turns, and a whole example.

The teacher reads the student's tokens, those between two turns included. Not here: the prompt
before the first turn (templates.py).
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from stable_opd_mcore.commands.check.finding import Finding, finding
from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.data.bridge import Bridge
from stable_opd_mcore.data.environment_names import environments_of
from stable_opd_mcore.data.messages import Message
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.pair import ModelFiles
from stable_opd_mcore.inputs.restarts import restart_problem
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.records import Sample
from stable_opd_mcore.rollout.agent_account import lost_share

_SHOWN_CHARACTERS = 400  # of one piece
_TOOL_MESSAGE = re.compile(rb"""["']role["']\s*:\s*["']tool["']""")
_CONVERSATION: list[Message] = [
    {"role": role, "content": "1+1?"} for role in ("user", "assistant", "tool")
]


def different_bridges(inputs: RunInputs) -> Iterator[Finding]:
    """A teacher that scores several turns, and whose template writes another text between them."""
    teacher = inputs.pair.teacher
    if teacher is None or not teacher.tokenizer.has_template:
        return
    bridge, of_teacher = Bridge(inputs.pair.student.tokenizer), Bridge(teacher.tokenizer)
    for role in sorted(_scored_roles(inputs)):
        if found := bridge.difference(of_teacher, role):
            yield finding("different-bridges", role=role, student=found[0], teacher=found[1])


def _scored_roles(inputs: RunInputs) -> frozenset[str]:
    """The roles of the messages between turns that the teacher scores: of an environment those of
    its example episode, and `tool` if its file has such messages."""
    played = frozenset[str]().union(*(example.roles for example in inputs.example_episodes))
    if any(map(_names_tool, _played(inputs))):
        tool_messages(inputs)  # raises where the student's template cannot write them
        played |= {"tool"}
    scores_golden = inputs.config.objectives[0].on_policy_fraction < 1
    return played | inputs.prompts.roles_between() if scores_golden else played


def _played(inputs: RunInputs) -> list[EnvironmentConfig]:
    """The environments of a run with rollouts."""
    return [*environments_of(inputs.config).values()] if inputs.objective.needs_rollouts else []


def _names_tool(environment: EnvironmentConfig) -> bool:
    """Whether the file writes out a message as {"role": "tool", ...}.

    A student that calls no tool in the example episode gets no such message there.
    """
    return _TOOL_MESSAGE.search(environment.read().source) is not None


def tool_messages(inputs: RunInputs) -> None:
    """A student's template that cannot write `tool` messages, the first of which ends the run."""
    bridge = Bridge(inputs.tokenizer)
    for environment in filter(_names_tool, _played(inputs)):
        if environment.history == "append":
            bridge.append(_CONVERSATION[2:], inputs.tokenizer.stop_token_ids[0])
        else:
            bridge.render(_CONVERSATION, ())


def failing_environments(inputs: RunInputs) -> Iterator[Finding]:
    """Environments that fail in an example episode."""
    for example in inputs.example_episodes:
        if example.failure is not None:
            row = f"{example.setting}, {example.rollout.prompt.prompt_id}"
            values = {"row": row, "failure": example.failure}
            yield finding("failing-environment", function=example.function, **values)


def rewritten_histories(inputs: RunInputs) -> Iterator[Finding]:
    """Agents that give the student's turns back in another form."""
    for example in inputs.example_episodes:
        account = example.rollout.account
        if account.get("rewritten"):
            share = f"{lost_share(account):.0%}"
            given = {"function": example.function, "first": example.first_rewritten}
            yield finding("rewritten-history", share=share, **given)


def two_ends(inputs: RunInputs) -> Iterator[Finding]:
    """A template that ends a turn in a history with another token than the student."""
    student, bridge = inputs.pair.student, Bridge(inputs.tokenizer)
    appends = any(played.history == "append" for played in _played(inputs))
    if appends and bridge.refusal("user") is None:
        end, own = bridge.turn_end, student.stop_ids[0]
        if end != own:
            named = {"own": student.named(own), "of_history": student.named(end)}
            yield finding("two-ends-of-a-turn", **named)


def restarts(inputs: RunInputs) -> None:
    """New contexts with a setting that assumes one; `train` refuses them."""
    examples = [example.rollout for example in inputs.example_episodes]
    if problem := restart_problem(inputs.config, examples):
        raise UserError(problem)


def facts(inputs: RunInputs) -> list[str]:
    """The example episode of each environment, as lines."""
    return [example.line() for example in inputs.example_episodes]


def shown_transcript(model: ModelFiles, samples: Sequence[Sample]) -> str:
    """The contexts of a conversation as this model reads them: the prompt of each, and the sampled
    and observed pieces after it.

    A prompt of the teacher's own is shown for the teacher.
    """
    return "\n\n".join(
        _shown_context(model, sample, "a new context" if number else "prompt")
        for number, sample in enumerate(samples)
    )


def _shown_context(model: ModelFiles, sample: Sample, name: str) -> str:
    is_sampled = np.zeros(len(sample.token_ids), np.bool_)
    is_sampled[sample.places] = True
    start, prompt = sample.num_prompt_tokens, sample.teacher_prompt_token_ids
    if prompt is None or model.role == "student":
        prompt = sample.token_ids[:start]
    parts = [(name, prompt)]
    borders = start + 1 + np.flatnonzero(np.diff(is_sampled[start:]))
    for begin, end in zip([start, *borders], [*borders, len(is_sampled)], strict=True):
        if begin < end:
            name = "sampled" if is_sampled[begin] else "observed"
            parts.append((name, sample.token_ids[begin:end]))
    return "\n".join(_piece(model, name, ids.tolist()) for name, ids in parts)


def _piece(model: ModelFiles, name: str, token_ids: list[int]) -> str:
    text, half = "".join(model.tokenizer.pieces(token_ids)), _SHOWN_CHARACTERS // 2
    if len(text) > 2 * half:
        text = f"{text[:half]} ... {text[-half:]}"
    return f"[{name}: {len(token_ids)} tokens]\n{text}"
