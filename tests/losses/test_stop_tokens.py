"""Stop ids of two models as one outcome: probabilities, shares and the merged columns by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.definitions import merge_ids
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.stop_tokens import (
    NEVER,
    TargetColumns,
    compared_sums,
    merge_stops_,
    shared_stop_ids,
    support_divergence,
)
from stable_opd_mcore.losses.torch_ops import Normaliser
from stable_opd_mcore.losses.vocabulary_sums import PairStatistics, merge_shards
from tests.losses.cases import assert_close, make_case, make_config, run_definition, run_fused

close = torch.testing.assert_close
STUDENT = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).log()
TEACHER = torch.tensor([[0.4, 0.2, 0.3, 0.1], [0.1, 0.1, 0.1, 0.7]]).log()
HEAD = Head(torch.empty(4, 1), 0, 4)
ONE = Normaliser(torch.zeros(2), torch.zeros(2))  # of logits that are log-probabilities


def test_one_shared_stop_id_is_not_merged():
    assert shared_stop_ids((7,), [7, 7]) == ()
    assert shared_stop_ids((8,), (7,)) == (7, 8)
    expected = (
        "a stop class needs stop ids of both models; student has [], teacher has [3, 4]: set "
        "student.stop_token_ids and teacher.stop_token_ids, or objective.stop_class=false"
    )
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        shared_stop_ids((), (4, 3))
    with pytest.raises(UserError, match=r"student has \[3\], teacher has \[\]"):
        shared_stop_ids((3,), ())


def test_stop_targets_have_the_probability_of_all_stop_ids():
    targets = TargetColumns.of(torch.tensor([3, 2]), (1, 3), HEAD)
    assert targets.ids_NJ.tolist() == [[3, 1, 3], [2, 1, 3]]
    found = targets.logprobs(STUDENT.gather(1, targets.ids_NJ), ONE)
    close(found.token_logprob_C.exp(), torch.tensor([0.4, 0.2]))
    close(found.logprob_C.exp(), torch.tensor([0.2 + 0.4, 0.2]))
    close(found.share_CJ, torch.tensor([[0.0, 1 / 3, 2 / 3], [1.0, 0.0, 0.0]]))


def test_without_stop_ids_a_target_has_its_own_probability():
    targets = TargetColumns.of(torch.tensor([3, 2]), (), HEAD)
    found = targets.logprobs(STUDENT.gather(1, targets.ids_NJ), ONE)
    assert found.logprob_C is found.token_logprob_C
    assert found.share_CJ.tolist() == [[1], [1]]


def test_columns_of_other_shards_are_looked_up_as_zero():
    """Two shards of two columns, and a third without any."""
    shards = [Head(torch.empty(2, 1), start, 4) for start in (0, 2, 4)]
    columns = [TargetColumns.of(torch.tensor([3, 0]), (0, 3), head) for head in shards]
    parts = [
        each.gather(STUDENT[:, start : start + 2])
        for each, start in zip(columns, (0, 2, 4), strict=True)
    ]
    close(sum(parts), STUDENT.gather(1, torch.tensor([[3, 0, 3], [0, 0, 3]])))
    values = torch.arange(6.0).view(2, 3)
    assert [each.sparse(values).columns_CJ.tolist() for each in columns] == [
        [[-1, 0, -1], [0, 0, -1]],
        [[1, -1, 1], [-1, -1, 1]],
        [[-1] * 3] * 2,
    ]
    # What the target adds is added to its stop id.
    assert columns[0].at_stop_ids(values).tolist() == [[1, 0 + 2], [3 + 4, 5]]


def test_stop_ids_outside_the_common_vocabulary_are_refused():
    message = r"stop ids \[4, -1\] lie outside the common vocabulary of 4"
    with pytest.raises(UserError, match=message):
        TargetColumns.of(torch.tensor([0]), (3, 4, -1), HEAD)
    with pytest.raises(UserError, match=message):
        merge_stops_({"student": STUDENT.clone()}, (3, 4, -1), 1.0, HEAD)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_merged_columns_hold_the_sum_of_their_probabilities(temperature):
    """Logits are those before the temperature, and the sum is of probabilities after it."""
    logits = {"student": STUDENT * temperature, "teacher": TEACHER * temperature}
    merged = merge_stops_(logits, (1, 3), 1 / temperature, HEAD)
    probabilities = {name: (x / temperature).exp() for name, x in logits.items()}
    close(probabilities["student"], torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.4, 0.4, 0.2, 0.0]]))
    close(probabilities["teacher"], torch.tensor([[0.4, 0.3, 0.3, 0.0], [0.1, 0.8, 0.1, 0.0]]))
    close(merged.share_CJ, torch.tensor([[1 / 3, 2 / 3], [3 / 4, 1 / 4]]))
    assert (logits["student"][:, 3] == NEVER).all()


def test_one_dominant_stop_id_keeps_its_logit_bit_for_bit():
    logits = torch.tensor([[0.1, -1e4, 40.1, 3.3]])
    merged = merge_stops_({"student": logits}, (1, 2), 1 / 0.7, HEAD)
    assert merged.logit_C1["student"].item() == torch.tensor(40.1).item()


def test_sums_with_merged_stop_ids_are_those_of_the_merged_distributions():
    logits = {"student": STUDENT.clone(), "teacher": TEACHER.clone()}
    merged = merge_stops_(logits, (1, 3), 1.0, HEAD)
    sums = compared_sums(logits, ("teacher",), merged, HEAD, 1.0)
    (statistics,), _ = merge_shards(sums, [STUDENT[:, :0]], HEAD)
    assert isinstance(statistics, PairStatistics)
    log_p, log_q = (merge_ids(x, (1, 3)) for x in (STUDENT, TEACHER))
    close(statistics.reverse_kl_C, (log_p.exp() * (log_p - log_q)).sum(1))
    close(merged.token_entropy(statistics, 1.0), -(STUDENT.exp() * STUDENT).sum(1))


def test_support_divergence_takes_the_exact_logit_of_the_outcome():
    """The column of the outcome may be rounded; its logit in fp32 replaces it."""
    logits = {"student": STUDENT.clone(), "teacher": TEACHER.clone()}
    merged = merge_stops_(logits, (1, 3), 1.0, HEAD)
    ids = torch.tensor([[1, 2], [1, 0]])
    rounded = {f"{name} support": x.gather(1, ids) + (ids == 1) for name, x in logits.items()}
    found = support_divergence(ids, rounded, merged, None, 1.0)
    assert found is not None
    p, q = (
        torch.tensor([[2 / 3, 1 / 3], [1 / 2, 1 / 2]]),
        torch.tensor([[0.5, 0.5], [8 / 9, 1 / 9]]),
    )
    close(found.value_C, (p * (p / q).log()).sum(1))
    assert support_divergence(None, {}, merged, None, 1.0) is None


def test_support_divergence_without_the_teachers_logits_takes_its_top_k():
    ids, served = torch.tensor([[3, 2], [3, 0]]), torch.tensor([[0.3, 0.1], [0.2, 0.2]]).log()
    looked_up = {"student support": STUDENT.gather(1, ids)}
    found = support_divergence(ids, looked_up, None, served, 1.0)
    assert found is not None
    p, q = (
        torch.tensor([[4 / 7, 3 / 7], [1 / 5, 4 / 5]]),
        torch.tensor([[3 / 4, 1 / 4], [0.5, 0.5]]),
    )
    close(found.value_C, (p * (p / q).log()).sum(1))


def test_merged_stop_ids_are_not_rounded_to_bf16():
    """Stop logits 40 and 39.75 merge to 40.576. In bf16 this would be 40.5 and the NLL .14 less."""
    config = make_config(objective__name="gkd", mixture={"lambda": 1.0})
    case = make_case(config, 3, 5, stop_ids=((1, 2), (2, 3)))
    student = torch.tensor([[40, 40, 39.75, -40, 0]]).expand(3, -1)
    teacher = torch.tensor([[39.75, 20, 40, 39.75, 0]]).expand(3, -1)
    case = replace(
        case,
        hidden_NH=student.double(),
        weight_VH=torch.eye(5).double(),
        teacher_hidden_NH=teacher.double(),
        teacher_weight_VH=torch.eye(5).double(),
        batch=replace(
            case.batch,
            targets_N=torch.tensor([0, 1, 4]),
            pg_weight_N=torch.ones(3),
            sft_weight_N=torch.ones(3),
            teacher=replace(case.batch.teacher, hidden_NH=teacher),
        ),
    )
    found, expected = run_fused(case, torch.bfloat16), run_definition(case)
    for name in ("pg", "sft"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-6, atol=1e-6
        )
    assert_close(found, expected, 5e-3)


MERGING = [
    {"objective__name": "gkd"},
    {"objective__name": "gkd", "objective__divergence": "jsd"},
    {"objective__name": "lsm", "objective__top_k": 4},
    {"objective__name": "student_topk", "objective__top_k": 4},
    {"objective__advantage__control_variate": True},
]


@pytest.mark.parametrize("changes", MERGING)
@pytest.mark.parametrize("stop_ids", [((0,), (30,)), ((29, 30), (0, 1))])
def test_stop_ids_at_the_first_and_the_last_column(changes, stop_ids):
    case = make_case(make_config(**changes, kl__beta=0.2), stop_ids=stop_ids)
    assert_close(run_fused(case, padding=3), run_definition(case), 1e-10)


@pytest.mark.parametrize("changes", MERGING)
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_the_reported_entropy_is_that_of_tokens(changes, temperature):
    case = make_case(make_config(**changes, sampling__temperature=temperature))
    hidden = case.hidden_NH.clone().requires_grad_()
    heads = [
        Head(weight, 0, 31)
        for weight in (case.weight_VH, case.teacher_weight_VH, case.reference_weight_VH)
    ]
    found = case.objective(
        hidden, heads[0], case.batch, teacher_head=heads[1], reference_head=heads[2]
    )
    log_p = (case.hidden_NH @ case.weight_VH.T / temperature).log_softmax(-1)
    torch.testing.assert_close(found.entropy_N, -(log_p.exp() * log_p).sum(1))
    tokens = log_p.gather(1, case.batch.targets_N[:, None])[:, 0]
    rollouts = case.batch.sft_weight_N == 0
    torch.testing.assert_close(found.token_logprob_N[rollouts], tokens[rollouts])
