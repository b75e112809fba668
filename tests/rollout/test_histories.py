"""Which context a request continues: histories of agents against what the student read."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stable_opd_mcore.data.bridge import Bridge, Observed
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.chat_api import ChatReply, ChatRequest, ToolCall
from stable_opd_mcore.rollout.histories import Histories
from tests.data.real_tokenizers import QWEN3, QWEN25, real_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "1+1?"}
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Told:
    """A student that says given texts, and the token ids of its contexts."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.tokenizer: Tokenizer = real_tokenizer(name)
        decode, path = self.tokenizer.decode, self.tokenizer.path
        self.histories = Histories(Bridge(self.tokenizer), decode, path, (), **settings)
        self.contexts: list[list[int]] = []

    def ask(self, *messages: Any, tools: Any = (), said: str = "2", **reply: Any) -> Observed:
        """A request and its turn; `reply` has what of the turn is no content."""
        seen = self.histories.observed(ChatRequest(messages, tools))
        if seen.restarts or not self.contexts:
            number = len(self.contexts)
            self.contexts.append([*seen.token_ids])
        else:
            number = seen.context if seen.context is not None else 0
            self.contexts[number] += seen.token_ids
        assert self.histories.length(seen) == len(self.contexts[number])
        raw = f"<think>\n{reply['reasoning']}\n</think>\n\n{said}" if "reasoning" in reply else said
        self.contexts[number] += [*self.tokenizer.encode(raw), self.tokenizer.stop_token_ids[0]]
        ids = np.array(self.contexts[number], np.int32)
        self.histories.said(ChatReply(said, **reply), ids)
        return seen

    def text(self, number: int = -1) -> str:
        return self.tokenizer.decode(self.contexts[number])

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.histories.counts.items() if count}


def assistant(text: str | None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    made = [{"id": "other", "type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if calls else {}), **more}


@pytest.mark.parametrize("name", [QWEN25, QWEN3])
def test_a_history_is_continued_with_its_own_tokens(name):
    """Thoughts stay, whatever the agent or the chat template drops."""
    told = Told(name)
    told.ask(SYSTEM, ASK, reasoning="Hm.")
    first = told.text()
    seen = told.ask(SYSTEM, ASK, assistant(" 2\n"), user("2+2?"), said="4")
    assert (seen.context, seen.restarts) == (0, False)
    added = "<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4"
    assert told.text() == first + added
    kept = assistant("2", reasoning_content="Hm.")
    told.ask(SYSTEM, ASK, kept, user("2+2?"), assistant("4"), user("3+3?"))
    assert len(told.contexts) == 1
    assert told.counts() == {"begun": 1, "continued": 2, "dropped_thoughts": 1}


def test_calls_are_matched_by_name_and_value():
    told = Told(QWEN25)
    call = ToolCall("123456789", "add", {"a": 1, "b": [2.0]})
    told.ask(ASK, tools=TOOLS, said="", calls=(call,))
    again = {"name": "add", "arguments": {"b": [2], "a": 1}}
    reply = {"role": "tool", "content": "3", "tool_call_id": "other"}
    seen = told.ask(ASK, assistant(None, again), reply, tools=TOOLS)
    assert seen.context == 0
    assert "<tool_response>\n3\n</tool_response>" in told.text()
    assert told.histories.roles == {"tool"}
    # Another call is another history, and other tools are another context.
    edited = {"name": "add", "arguments": {"a": 2}}
    assert told.ask(ASK, assistant(None, edited), reply, tools=TOOLS).restarts
    assert told.ask(ASK, assistant(None, again), reply).restarts
    assert told.counts() == {
        **{"begun": 1, "continued": 1, "rewritten": 2},
        **{"rewritten_edited": 1, "rewritten_tools": 1},
    }
    assert "message 1 of 3" in told.histories.first_rewritten


def test_forks_share_tokens_and_summaries_and_sub_agents_begin_anew():
    told = Told(QWEN3)
    told.ask(ASK, reasoning="Hm.")
    shared = [*told.contexts[0]]
    told.ask(ASK, assistant("2"), user("2+2?"), said="4")
    fork = told.ask(ASK, assistant("2"), user("3+3?"), said="6")
    assert fork.restarts
    assert told.contexts[1][: len(shared)] == shared
    assert told.ask(user("A sub-agent's question.")).restarts
    assert told.ask(ASK, user("A summary: 2, 4.")).restarts
    # Each of them is still continued at its end: the newest of equal histories.
    assert told.ask(ASK, assistant("2"), user("3+3?"), assistant("6"), user("!")).context == 1
    assert told.ask(ASK, assistant("2"), user("2+2?"), assistant("4"), user("!")).context == 0
    counts = {"begun": 3, "continued": 3, "forked": 1, "dropped_thoughts": 1}
    assert told.counts() == counts


def test_the_same_request_again_is_another_turn_of_the_same_history():
    told = Told(QWEN25)
    asked = [told.ask(ASK), told.ask(ASK), told.ask(ASK, assistant("2"), user("2+2?"))]
    assert [seen.restarts for seen in asked] == [True, True, False]
    assert asked[2].context == 1


def test_an_edited_history_is_rendered_whole_and_named():
    told = Told(QWEN3)
    told.ask(SYSTEM, ASK, reasoning="Hm.")
    changed = [SYSTEM, ASK, assistant("two"), user("2+2?")]
    assert told.ask(*changed).restarts
    assert told.text().startswith(told.tokenizer.render(changed, generation_prompt=True))
    assert told.counts() == {"begun": 1, "rewritten": 1, "rewritten_edited": 1}
    assert "message 2 of 4" in told.histories.first_rewritten
    # Examples that no student said are no turns of it.
    told.ask(SYSTEM, user("Another."), assistant("Yes."), user("And?"))
    assert told.counts()["begun"] == 2


def test_messages_that_cannot_follow_a_turn_are_rendered():
    for name, restarts in ((QWEN25, False), (QWEN3, True)):  # it drops the thought
        told = Told(name)
        told.ask(ASK, said="<think>\nHm.\n</think>\n\n2")
        said = assistant("<think>\nHm.\n</think>\n\n2")
        assert told.ask(ASK, said, SYSTEM, user("Go on.")).restarts == restarts
        assert told.counts().get("rewritten_refused", 0) == restarts


@pytest.mark.parametrize(("name", "extends"), [(QWEN25, True), (QWEN3, False)])
def test_with_the_templates_history_what_it_writes_decides(name, extends):
    told = Told(name, appends=False)
    told.ask(ASK, said="<think>\nHm.\n</think>\n\n2")
    seen = told.ask(ASK, assistant("<think>\nHm.\n</think>\n\n2"), user("2+2?"))
    assert seen.restarts != extends
    assert (seen.context == 0) == extends


def test_the_rows_own_prompt_is_no_new_context():
    told = Told(QWEN25)
    ids = tuple(told.tokenizer.encode(told.tokenizer.render([ASK], generation_prompt=True)))
    histories = replace(told.histories, prompt_ids=ids)
    assert histories.observed(ChatRequest((ASK,))) == Observed()
    assert histories.length(Observed()) == len(ids)
