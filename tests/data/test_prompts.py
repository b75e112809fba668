"""Order of prompts by cursor, and prompts against the model's window."""

import logging
import re
from dataclasses import replace

import pytest

from stable_opd_mcore.config.data import DataConfig, SourceConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.prompts import PromptOrder, PromptSet
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.errors import DataError

ROWS = [
    Row("s:1", "1+1", "2", "1+1=2;[2]", "bracket"),
    Row("s:2", "1+2*3-4", "0", "1+2=3;3*3=4;4-4=0;[0]", "bracket"),
    Row("s:3", "2*2-1*3-2*4-4*1", "4", "2*2=4;4-1=3;3*3=4;4-2=2;2*4=3;3-4=4;4*1=4;[4]", "bracket"),
]


def data_config(**changes):
    return DataConfig(**{"train": SourceConfig(path="synthetic:arithmetic"), **changes})


def make_set(rows=ROWS, window=64, max_new_tokens=30, golden="required", **changes):
    return PromptSet(
        rows,
        Tokenizer.load("synthetic"),
        data_config(**changes),
        window=window,
        max_new_tokens=max_new_tokens,
        golden=golden,
    )


class ThinkingTokenizer:
    """One id for each letter; prompts open a thought."""

    stop_token_ids = (0,)
    has_template = False

    def render_prompt(self, problem, template, system, tools):
        return f"{system}: {template.format(problem=problem)}<think>"

    def control_token_in(self, text):
        return None

    def encode_many(self, texts):
        return [[ord(letter) for letter in text] for text in texts]


def test_prompts_hold_the_system_prompt_and_know_that_they_open_a_thought():
    config = data_config(system_prompt="Add", prompt_template="{problem}?")
    tokenizer = ThinkingTokenizer()
    (prompt,) = PromptSet(
        ROWS[:1], tokenizer, config, window=64, max_new_tokens=9, golden="required"
    )
    assert "".join(map(chr, prompt.token_ids)) == "Add: 1+1?<think>"
    assert "".join(map(chr, prompt.golden_token_ids)) == "\n</think>\n\n1+1=2;[2]\0"
    assert prompt.opens_thinking is True


def test_any_split_of_the_range_into_calls_gives_the_same_rows():
    order = PromptOrder(num_rows=7, seed=1)
    whole = order.indices(0, 40)
    assert [i for cursor in range(0, 40, 5) for i in order.indices(cursor, 5)] == whole
    assert order.indices(13, 0) == []
    assert PromptOrder(num_rows=7, seed=1).indices(20, 20) == whole[20:]


@pytest.mark.parametrize(("num_rows", "per_step"), [(7, 5), (10, 4), (5, 5), (23, 9)])
def test_a_step_that_crosses_an_epoch_has_no_row_twice(num_rows, per_step):
    order = PromptOrder(num_rows, seed=0, per_step=per_step)
    steps = [order.indices(step * per_step, per_step) for step in range(60)]
    assert all(len(set(step)) == per_step for step in steps)
    taken = [row for step in steps for row in step]
    epochs = [taken[k : k + num_rows] for k in range(0, len(taken) - num_rows + 1, num_rows)]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(num_rows))
    assert PromptOrder(num_rows, seed=1, per_step=per_step).indices(0, num_rows) != epochs[0]
    resumed = PromptOrder(num_rows, seed=0, per_step=per_step)
    assert resumed.indices(41 * per_step, per_step) == steps[41]


def test_rows_become_prompts_with_golden_ids():
    prompts = make_set()
    tokenizer = Tokenizer.load("synthetic")
    first = prompts[0]
    assert first.token_ids == tuple(tokenizer.encode(tokenizer.render_prompt("1+1")))
    assert first.golden_token_ids == (*tokenizer.encode("1+1=2;[2]"), *tokenizer.stop_token_ids[:1])
    assert (first.prompt_id, first.text, first.answer) == ("s:1", "1+1", "2")
    assert first.answer_format == "bracket"
    assert first.opens_thinking is False
    assert [p.prompt_id for p in prompts.select([2, 0, 2])] == ["s:3", "s:1", "s:3"]


def test_overlong_prompts_and_golden_solutions_are_errors_with_both_numbers():
    with pytest.raises(
        DataError, match=r"s:2: its prompt has 8 .*max_new_tokens=30.*window of 35; lower"
    ):
        make_set(window=35)
    turns = [replace(row, max_new_tokens=40) for row in ROWS]
    with pytest.raises(DataError, match=r"=40 that exceeds .* of 47; lower environment\.max_new_t"):
        make_set(turns, window=47)
    assert len(make_set(turns, window=47, max_new_tokens=0, golden="none")) == 3  # no rollouts
    with pytest.raises(DataError, match=r"s:2: its golden solution has 22 .*prompt's 8.*of 29"):
        make_set(window=29, max_new_tokens=10)
    assert (
        make_set(ROWS[:2], window=35, max_new_tokens=27, golden="none")[1].golden_token_ids is None
    )


def test_overlong_rows_can_be_dropped_and_are_counted(caplog):
    with caplog.at_level(logging.WARNING):
        prompts = make_set(window=35, overlong="drop")
    assert [prompts[i].prompt_id for i in range(len(prompts))] == ["s:1"]
    assert prompts.num_dropped == 2
    assert caplog.messages == ["dropped 2 of 3 rows that exceed the window of 35 tokens"]
    with pytest.raises(DataError, match="none of 3 rows fits the window of 10"):
        make_set(window=10, overlong="drop")


def test_missing_golden_solutions():
    rows = [ROWS[0], Row("s:9", "1+1", "2", None)]
    fix = "; set data.train.columns.solution, or mixture.lambda=0; "
    for golden in ("required", "by_source"):
        with pytest.raises(DataError, match=f"s:9: no golden solution.*{fix}"):
            make_set(rows, golden=golden)
    sources = [{"path": "s", "name": "s", "columns": {"solution": None}}, {"path": "t"}]
    prompts = make_set(rows, golden="by_source", train=sources)
    assert prompts[0].golden_token_ids
    assert prompts[1].golden_token_ids is None
    with pytest.raises(DataError, match="s:9: no golden solution"):
        make_set(rows, train=sources)
    with pytest.raises(DataError, match=r"no row of data\.train has a golden"):
        make_set(rows[1:], golden="by_source", train=sources)
    assert len(make_set(rows[1:], golden="none", train=sources)) == 1


@pytest.mark.parametrize(
    ("answer", "solution"),
    [("2", "2"), ("2", " 2 "), ("2", "The answer is \\boxed{2}."), (None, " ")],
)
def test_a_bare_answer_is_no_golden_solution(answer, solution):
    rows = [ROWS[0], Row("s:9", "1+1", answer, solution)]
    expected = (
        f"s:9: the golden solution is the bare answer '{answer or ''}'; set "
        "data.*.columns.solution to a column of worked solutions, or to null without sft and with "
        "mixture.lambda=0"
    )
    with pytest.raises(DataError, match=f"^{re.escape(expected)}$"):
        make_set(rows, golden="required")
    assert len(make_set(rows, golden="none")) == 2


def test_control_tokens_in_a_row_are_refused_by_row():
    hostile = [ROWS[0], Row("s:9", "1+1$", "2", "1+1=2;[2]!$")]
    with pytest.raises(
        DataError, match=r"s:9: the problem contains '\$', a control token of synth"
    ):
        make_set(hostile)
    stopped = [ROWS[0], Row("s:9", "1+1", "2", "1+1=2;[2]!$")]
    with pytest.raises(DataError, match=r"s:9: the solution contains '!'"):
        make_set(stopped)
    assert len(make_set(stopped, golden="none")) == 2


def test_lengths_that_just_fit_are_kept():
    assert len(make_set(ROWS[:2], window=30, max_new_tokens=22, golden="required")) == 2
    assert PromptOrder(1, seed=0).indices(3, 2) == [0, 0]


def test_a_template_that_renders_to_nothing_is_refused():
    class Silent(ThinkingTokenizer):
        def render_prompt(self, problem, template, system, tools):
            return ""

    with pytest.raises(DataError, match="s:1: the chat template renders its prompt to no tokens"):
        PromptSet(ROWS[:1], Silent(), data_config(), window=64, max_new_tokens=9)
