"""Which row is kept, with which solution, and why another is not."""

import pytest

from stable_opd_mcore.commands.prepare.openr1 import Dropped
from stable_opd_mcore.commands.prepare.rules import Kept, Rules
from stable_opd_mcore.config.data import ColumnsConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.rows import Row
from tests.commands.prepare.make_inputs import word_tokenizer

GSM8K = ColumnsConfig(problem="question", answer="answer", solution="answer")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(str(word_tokenizer(tmp_path_factory.mktemp("student"))))


def rules(tokenizer, openr1=False, columns=None):
    return Rules(
        openr1=openr1,
        columns=columns or ColumnsConfig(),
        max_tokens=4,
        tokenizer_json=tokenizer.json_text,
        control_tokens=tokenizer.control_tokens,
        benchmarks={"aime24": [Row("aime24.jsonl:3", "How many primes?")]},
    )


def applying(tokenizer, **settings):
    """What the rules say of one record."""
    applied = rules(tokenizer, **settings).apply
    return lambda record: applied([("f:1", record)])[0]


def openr1_record(*generations, **changes):
    verdicts = [True] * len(generations)
    return {
        "problem": "1 + 1 is?",
        "answer": "2",
        "generations": list(generations),
        "correctness_math_verify": verdicts,
        "is_reasoning_complete": verdicts,
        **changes,
    }


def test_the_shortest_solution_in_tokens_is_kept(tokenizer):
    records = [openr1_record("a b c", "longword two", "x y z w v"), {}, openr1_record("a b c")]
    found = rules(tokenizer, openr1=True).apply([("f:1", record) for record in records])
    assert found[1:] == [Dropped("empty problem"), Kept("1 + 1 is?", "2", "a b c", 4, 3)]
    assert found[0] == Kept("1 + 1 is?", "2", "longword two", problem_tokens=4, solution_tokens=2)


def test_a_solution_of_exactly_the_limit_is_kept(tokenizer):
    apply = applying(tokenizer, openr1=True)
    assert apply(openr1_record("a b c d")).solution_tokens == 4
    assert apply(openr1_record("a b c d e")) == Dropped("longer than 4 tokens", "5 tokens")


def test_solutions_with_control_tokens_or_without_steps_are_passed_over(tokenizer):
    apply = applying(tokenizer, openr1=True)
    assert apply(openr1_record("a <|im_end|>", "2", "a b c")).solution == "a b c"
    dropped = apply(openr1_record("a <|im_end|>"))
    assert dropped == Dropped("control token in every solution", "<|im_end|>")
    assert apply(openr1_record(" 2")) == Dropped("every solution is the bare answer")
    dropped = apply(openr1_record("a", problem="x <|im_end|>"))
    assert dropped == Dropped("control token in the problem", "<|im_end|>")


def test_malformed_rows_are_named(tokenizer):
    apply = applying(tokenizer, openr1=True)
    dropped = apply(openr1_record("a b", finish_reasons=[]))
    assert isinstance(dropped, Kept)  # an empty list says nothing, like null
    dropped = apply(openr1_record("a b", finish_reasons=["stop"] * 2))
    assert dropped.reason == "malformed"
    assert "f:1" in dropped.detail
    assert apply(openr1_record("a \ud83d")).reason == "malformed"
    assert applying(tokenizer)({"question": "x"}).reason == "malformed"


def test_other_data_keep_their_columns_and_gsm8k_its_form(tokenizer):
    record = {"question": "Far?", "answer": "He runs.\n#### 1,200"}
    kept = applying(tokenizer, columns=GSM8K)(record)
    assert kept == Kept("Far?", "1200", record["answer"], 1, 4)
    apply = applying(tokenizer, columns=GSM8K.model_copy(update={"solution": None}))
    assert apply(record) == Kept("Far?", "1200", None, 1, 0)
    dropped = applying(tokenizer, columns=GSM8K)({"question": "Far?", "answer": "#### 7"})
    assert dropped == Dropped("every solution is the bare answer")
