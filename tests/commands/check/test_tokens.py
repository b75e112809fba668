"""Ids that mean different tokens, and the first token of a prompt."""

import pytest

from tests.commands.check.directories import TEMPLATE, findings, the

BOS_FIRST = "{{ bos_token }}" + TEMPLATE
CASES = {  # student's and teacher's mutation -> severity, words of the title, both values
    "a mark of a turn": ({}, {"rename": {"<|im_start|>": "<user>"}},
     ("warning", "id 257 means different tokens", "'<|im_start|>'", "'<user>'")),
    "the student's stop token": ({}, {"rename": {"<|endoftext|>": "<eos>"}},
     ("warning", "id 256 means different tokens", "'<|endoftext|>'", "'<eos>'")),
    "a mark of a thought": ({}, {"rename": {"<|box_start|>": "<think>"}},
     ("warning", "id 259 means different tokens", "'<|box_start|>'", "'<think>'")),
    "a token in no template": ({}, {"rename": {"<|box_start|>": "<|quad|>"}},
     ("note", "id 259 means different tokens", "'<|box_start|>'", "'<|quad|>'")),
    "BOS in the teacher's prompts": ({}, {"template": BOS_FIRST, "bos": "<s>"},
     ("warning", "prompts begin with different tokens", "none", "260 '<s>'")),
    "BOS that the student's template lacks": ({"bos": "<s>", "add_bos": True},
     {"bos": "<s>", "add_bos": True},
     ("warning", "prompts lack the BOS", "260 '<s>'", "257 '<|im_start|>'")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_mutated_pair_is_found_with_both_values(case, tmp_path):
    student, teacher, (severity, title, *values) = CASES[case]
    finding = the(findings(tmp_path, student, teacher), title)
    assert finding.severity == severity
    assert [value for _, value in finding.values] == values
    assert finding.consequence
    assert finding.remedy


def test_other_base_tokens_are_refused_as_train_refuses_them(tmp_path):
    (finding,) = findings(tmp_path, {}, {"swap": ("3", "4")})
    assert finding.severity == "error"
    assert "have different tokenizers: id 18 is '3' in the first and '4' in the second" in (
        finding.title
    )


@pytest.mark.parametrize("rows", [261, 272, 320])
def test_a_pair_that_differs_in_padding_alone_has_no_finding(rows, tmp_path):
    assert findings(tmp_path, {}, {"vocab_size": rows}) == []
