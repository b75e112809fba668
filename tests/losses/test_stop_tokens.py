"""Stop ids of two models as one outcome: refusals, shares, and exact logits in bf16."""

import re
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.output_head import Head, ModelTensors
from stable_opd_mcore.losses.stop_tokens import (
    looked_up_ids,
    merge_stops_,
    shared_stop_ids,
    target_logprobs,
)
from stable_opd_mcore.losses.torch_ops import Normaliser
from tests.losses.cases import (
    assert_close,
    make_case,
    make_config,
    run_definition,
    run_fused,
    teacher_scores,
)

close = torch.testing.assert_close
STUDENT = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]).log()
HEAD = Head(torch.empty(4, 1), 0, 4)
ONE = Normaliser(torch.zeros(2), torch.zeros(2))  # the logits are log-probabilities


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


def test_stop_ids_outside_the_common_vocabulary_are_refused():
    message = r"stop ids \[4, -1\] lie outside the common vocabulary of 4"
    with pytest.raises(UserError, match=message):
        looked_up_ids(torch.tensor([0]), (3, 4, -1), 4)
    with pytest.raises(UserError, match=message):
        merge_stops_(ModelTensors(STUDENT.clone()), (3, 4, -1), 1.0, HEAD)


def test_one_dominant_stop_id_keeps_its_logit_bit_for_bit():
    logits = torch.tensor([[0.1, -1e4, 40.1, 3.3]])
    merged = merge_stops_(ModelTensors(logits), (1, 2), 1 / 0.7, HEAD)
    assert merged.logits.student.item() == torch.tensor(40.1).item()


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
