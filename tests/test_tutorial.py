"""The tutorial runs, and its loss is the trainer's."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import torch

from tests.losses.cases import make_case, make_config, run_fused

FILE = Path(__file__).parents[1] / "docs/examples/tutorial.py"
spec = importlib.util.spec_from_file_location("tutorial", FILE)
tutorial = importlib.util.module_from_spec(spec)
sys.modules["tutorial"] = tutorial
spec.loader.exec_module(tutorial)


def test_it_trains(capsys):
    accuracies = tutorial.main(pretraining=6, steps=2, prompts_per_step=4)
    assert len(accuracies) == 2
    assert "step  2  loss" in capsys.readouterr().out


def test_its_loss_has_the_gradient_of_the_fused_one():
    settings = {"kl__beta": tutorial.BETA, "kl__estimator": "exact", "objective__stop_class": False}
    case = make_case(make_config(**settings))
    batch = replace(case.batch, kl_weight_N=tutorial.BETA * case.batch.pg_weight_N)
    hidden_NH = case.hidden_NH.clone().requires_grad_()
    teacher_NV = (case.teacher_hidden_NH @ case.teacher_weight_VH.T).log_softmax(1)
    reference_NV = (case.reference_hidden_NH @ case.reference_weight_VH.T).log_softmax(1)
    student_NV = (hidden_NH @ case.weight_VH.T).log_softmax(1)
    loss = tutorial.on_policy(student_NV, teacher_NV, reference_NV, batch)
    (loss + tutorial.supervised(student_NV, batch)).backward()
    torch.testing.assert_close(hidden_NH.grad, run_fused(replace(case, batch=batch)).d_hidden)
