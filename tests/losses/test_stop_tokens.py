"""Stop ids of two models as one outcome: probabilities, shares and the merged columns by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.stop_tokens import (
    NEVER,
    compared_sums,
    looked_up_ids,
    merge_stops_,
    shared_stop_ids,
    target_logprobs,
)
from stable_opd_mcore.losses.torch_ops import Normaliser
from stable_opd_mcore.losses.vocabulary_sums import PairStatistics, merge_shards
from tests.losses.cases import (
    assert_close,
    make_case,
    make_config,
    run_definition,
    run_fused,
    teacher_scores,
)
from tests.losses.definitions import merge_ids

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


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_stop_targets_have_the_probability_of_all_stop_ids(shift):
    """Their gradient is the share of each id, which large logits do not round."""
    ids = looked_up_ids(torch.tensor([3, 2]), (1, 3), 4)
    assert ids.tolist() == [[3, 1, 3], [2, 1, 3]]
    logits = torch.tensor([[0.5, 2.0, 0.5], [0.25, 2.0, 0.5]]) - shift
    logits.requires_grad_()
    outcome, token = target_logprobs(logits, ONE, ids)
    stop = torch.tensor([2.0, 0.5])
    close(outcome + shift, torch.tensor([stop.logsumexp(0), 0.25]), rtol=1e-6, atol=shift * 1e-7)
    close(token + shift, torch.tensor([0.5, 0.25]))
    (gradient,) = torch.autograd.grad(outcome.sum(), logits)
    close(gradient, torch.tensor([[0, *stop.softmax(0)], [1, 0, 0]]))


def test_without_stop_ids_a_target_has_its_own_probability():
    ids = looked_up_ids(torch.tensor([3, 2]), (), 4)
    outcome, token = target_logprobs(STUDENT.gather(1, ids), ONE, ids)
    assert outcome is token
    close(outcome.exp(), torch.tensor([0.4, 0.2]))


def test_stop_ids_outside_the_common_vocabulary_are_refused():
    message = r"stop ids \[4, -1\] lie outside the common vocabulary of 4"
    with pytest.raises(UserError, match=message):
        looked_up_ids(torch.tensor([0]), (3, 4, -1), 4)
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


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_exact_logit_of_the_outcome_replaces_its_rounded_column(scale):
    logits = {"student": STUDENT.clone(), "teacher": TEACHER.clone()}
    merged = merge_stops_(logits, (1, 3), scale, HEAD)
    ids = torch.tensor([[1, 2], [3, 1]])
    for name, x in logits.items():
        exact = x.gather(1, ids) * scale
        close(merged.exact(ids, exact + (ids == 1), name, scale), exact)


@pytest.mark.parametrize("name", ["gkd", "lsm"])
def test_merged_stop_ids_are_not_rounded_to_bf16(name):
    """Stop logits 40 and 39.75 merge to 40.576. In bf16 this would be 40.5 and the NLL .14 less."""
    top_k = {"objective__top_k": 2} if name == "lsm" else {}
    config = make_config(objective__name=name, mixture={"lambda": 1.0}, **top_k)
    case = make_case(config, 3, 5, stop_ids=((1, 2), (2, 3)))
    student = torch.tensor([[40, 40, 39.75, -40, 0]]).expand(3, -1)
    teacher = torch.tensor([[39.75, 20, 40, 39.75, 0]]).expand(3, -1).double()
    scores = teacher_scores(
        case.objective, teacher.log_softmax(1), torch.tensor([0, 1, 4]), teacher
    )
    case = replace(
        case,
        hidden_NH=student.double(),
        weight_VH=torch.eye(5).double(),
        teacher_hidden_NH=teacher,
        teacher_weight_VH=torch.eye(5).double(),
        batch=replace(
            case.batch,
            targets_N=torch.tensor([0, 1, 4]),
            pg_weight_N=torch.ones(3),
            sft_weight_N=torch.ones(3),
            teacher=scores,
        ),
    )
    found, expected = run_fused(case, torch.bfloat16), run_definition(case)
    for part in ("pg", "sft"):
        close(getattr(found, part), getattr(expected, part), rtol=1e-6, atol=1e-6)
    assert_close(found, expected, 5e-3)
