"""Objectives of the user's own: what they get, that they go the built-in way, and refusals."""

from pathlib import Path

import pytest
import torch

from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.losses.objectives import build_objective
from tests.losses.cases import make_case, make_config, run_fused
from tests.losses.definitions import merge_ids
from tests.losses.variants import case_of

BUILT_IN = {
    "opd": ("teacher_logprob", {"kl__beta": 0.1, "objective__advantage__clamp": 0.2}),
    "grpo": ("given_advantage", {"objective__std_normalise": False}),
    "grpo_opd": (
        "given_advantage",
        "teacher_logprob",
        {"objective__advantage__teacher_weight": 0.3},
    ),
    "gkd": ("divergence", {"objective__divergence": "jsd", "objective__jsd_beta": 0.3}),
    "lsm": ("support", {"objective__top_k": 5}),
}


def own(path: Path, text: str, function: str = "own") -> dict[str, str]:
    (path / "own.py").write_text(text)
    return {"objective__name": f"{path}/own.py:{function}"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_objective_written_by_the_user_is_the_same(name, tmp_path):
    """The scores that it asks for are those of the built-in one, to the bit."""
    *needs, settings = BUILT_IN[name]
    used = "divergence_from_teacher" if name in ("gkd", "lsm") else name
    text = f"""
from stable_opd_mcore.losses import token_losses
NEEDS = {needs!r}
def own(rows, settings):
    return token_losses.{used}(rows, settings)
"""
    cases = [
        make_case(make_config(**settings, **named), old=True)
        for named in ({"objective__name": name}, own(tmp_path, text))
    ]
    built_in, written = (case.objective for case in cases)
    assert written.teacher_needs == built_in.teacher_needs
    assert written.needs_rewards == built_in.needs_rewards
    assert written.terms.merged_ids == built_in.terms.merged_ids
    expected, found = map(run_fused, cases)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.d_weight, expected.d_weight)


def test_the_example_of_an_objective_equals_its_definition():
    """docs/own_code.md: the margin, pair by pair, from whole distributions in float64."""
    case = case_of("own", 19, 31)
    log_p_NV = merge_ids((case.hidden_NH @ case.weight_VH.T).log_softmax(-1), (1, 2))
    teacher, expected = case.batch.teacher, 0.0
    for row, (ids, scores) in enumerate(
        zip(teacher.topk_ids_NK.tolist(), teacher.topk_logprobs_NK.tolist(), strict=True)
    ):
        pairs = [(a, b) for a in range(6) for b in range(6) if scores[a] > scores[b]]
        assert len(pairs) == 15
        gaps = [float(log_p_NV[row, ids[a]] - log_p_NV[row, ids[b]]) for a, b in pairs]
        mean = sum(max(0, 0.3 - gap) for gap in gaps) / len(pairs)
        expected += float(case.batch.pg_weight_N[row]) * mean
    assert float(run_fused(case).pg) == pytest.approx(expected, rel=1e-12)


CANNOT_WORK = [
    ("1 / 0\ndef own(rows, settings): ...", "importing it fails: ZeroDivisionError"),
    (
        "def own(rows, settings): return -rows.teacher_logprob * rows.logprob",
        r"own.py: own fails on a trial of 4 rows: TypeError.* NEEDS of the file names: none",
    ),
    ("def own(rows, settings): return rows.logprob.sum()", r"returns torch.Size\(\[\]\), exp"),
    ("def own(rows, settings): return 1.0", "returns float, expected a tensor of shape"),
    ("def own(rows, settings): return rows.old_logprob", "finite numbers with a gradient"),
    ("def own(rows, settings): return rows.logprob / 0", "expected finite numbers"),
    (
        "NEEDS = ('logits',)\ndef own(rows, settings): ...",
        "NEEDS is logits; set it to a tuple of",
    ),
    ("NEEDS = len\ndef own(rows, settings): ...", "NEEDS is .*len.*; set it to a tuple"),
    (
        "NEEDS = 'support', 'divergence'\ndef own(rows, settings): ...",
        "support and divergence at most one",
    ),
    ("def own(rows): ...", r"expected def own\(rows, settings\)"),
]  # text, message


def test_an_objective_that_cannot_work_is_refused_before_any_model(tmp_path):
    for text, message in CANNOT_WORK:
        with pytest.raises(ConfigError, match=message):
            build_objective(make_config(**own(tmp_path, text)), (1,), (2,))
        if "names: none" in message:
            named = own(tmp_path, f"NEEDS = ('teacher_logprob',)\n{text}")
            assert build_objective(make_config(**named), (1,), (2,))


def test_settings_that_an_own_objective_has_no_use_for_are_refused(tmp_path):
    named = own(tmp_path, "def own(rows, settings): return -settings.clip * rows.logprob")
    assert build_objective(make_config(**named), (1,), (2,)).teacher_needs == "none"
    with pytest.raises(ConfigError, match=r"objective\.top_k=3 would have no effect"):
        build_objective(make_config(**named, objective__top_k=3), (1,), (2,))
