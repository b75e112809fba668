"""The fused path against the definition on whole distributions, for every objective."""

import math
import re
from dataclasses import replace

import pytest
import torch

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.fused import fused_loss, require_finite_scores
from stable_opd_mcore.losses.output_head import Head
from stable_opd_mcore.losses.token_losses import Terms
from stable_opd_mcore.records import LossOutput, MicroBatch, Scores
from tests.losses.cases import (
    Case,
    assert_close,
    cast_batch,
    make_case,
    make_config,
    run_definition,
    run_fused,
    teacher_scores,
)
from tests.losses.definitions import target_logprob
from tests.losses.variants import VARIANTS, case_of

SEVERAL_STOPS = ((0, 40), (60, 40, 2))  # overlapping, with the first and the last column
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
def test_equals_definition(variant):
    """Stop tokens are among the targets, the masked and the golden rows of every larger case."""
    for rows, vocab, options in (
        (1, 1, {"temperature": 0.7, "old": True}),
        (13, 31, {}),
        (37, 61, {"temperature": 0.7, "old": True, "stop_ids": SEVERAL_STOPS}),
    ):
        case = case_of(variant, rows, vocab, **options)
        assert_close(run_fused(case, padding=3), run_definition(case), 1e-10)
    case = case_of(variant, 17, 257, **options, dtype=torch.float32)
    assert_close(run_fused(case, torch.float32), run_definition(case), 1e-5)
    case = case_of(variant, 29, 257, dtype=torch.bfloat16, seed=2, spread=2.0)
    assert_close(run_fused(case, torch.bfloat16), run_definition(case), 2e-2)


@every_variant
def test_golden_rows_that_no_model_scores_have_their_likelihood_at_temperature_1(variant):
    case = case_of(variant, 37, 61, temperature=0.7)
    rows = case.batch.golden_rows_G
    of_rows = {
        name: value[rows]
        for name, value in vars(case.batch).items()
        if name.endswith("_N") and value is not None
    }
    batch = replace(
        case.batch,
        **of_rows,
        golden_rows_G=torch.arange(len(rows)),
        teacher=None,
        reference=None,
        is_scored=False,
    )
    inputs = [x.clone().requires_grad_() for x in (case.hidden_NH[rows], case.weight_VH)]
    logprob_N = (inputs[0] @ inputs[1].T).log_softmax(1).gather(1, batch.targets_N[:, None])[:, 0]
    expected = -(batch.sft_weight_N * logprob_N).sum()
    found = case.objective(inputs[0], Head(inputs[1], 0, 61), batch)
    torch.testing.assert_close((found.loss, found.sft), (expected, expected))
    torch.testing.assert_close(found.token_logprob_N, logprob_N.detach())
    torch.testing.assert_close(
        torch.autograd.grad(found.loss, inputs), torch.autograd.grad(expected, inputs)
    )


def extreme(case: Case) -> Case:
    """Logits of +-1e4 for all models, exact in fp32: multiples of 1/8 plus a bias column."""
    rng = torch.Generator().manual_seed(5)

    def grid(*shape):
        return torch.randint(-12, 13, shape, generator=rng).double() / 8

    changes = {}
    for index, name in enumerate(("", "teacher_", "reference_")):
        hidden, weight = getattr(case, f"{name}hidden_NH"), getattr(case, f"{name}weight_VH")
        hidden, weight = grid(*hidden.shape), grid(*weight.shape)
        hidden[:, 0] = 1
        weight[:, 0] = 0
        weight[index::3, 0] = -1e4
        weight[index + 3 :: 7, 0] = 1e4
        changes[f"{name}hidden_NH"], changes[f"{name}weight_VH"] = hidden, weight
    reference = case.batch.reference
    assert reference is not None
    log_q = (changes["teacher_hidden_NH"] @ changes["teacher_weight_VH"].T).log_softmax(-1)
    batch = replace(
        case.batch,
        teacher=teacher_scores(
            case.objective, log_q, case.batch.targets_N, changes["teacher_hidden_NH"]
        ),
        reference=replace(reference, hidden_NH=changes["reference_hidden_NH"]),
    )
    return replace(case, batch=batch, **changes)


@every_variant
def test_equals_definition_with_improbable_targets_and_extreme_logits(variant):
    """With token weights of 0 the gradient is exactly 0."""
    case = improbable(case_of(variant, 12, 31, dtype=torch.float32))
    assert_close(run_fused(case, torch.float32), run_definition(case), 1e-5)
    case = extreme(case_of(variant, 23, 61))
    found, expected = run_fused(case, torch.float32), run_definition(case)
    # The bias column's gradient is a sum of terms of +-1e4 that nearly cancel; its error is
    # compared with the size of the terms.
    bias_error = (found.d_hidden - expected.d_hidden)[:, 0].abs().max()
    assert bias_error <= 1e-5 * 1e4 * expected.d_weight.abs().max()
    found, expected = (replace(x, d_hidden=x.d_hidden[:, 1:]) for x in (found, expected))
    assert_close(found, expected, 1e-5)
    zero = torch.zeros(23, dtype=torch.float64)
    batch = replace(case.batch, pg_weight_N=zero, kl_weight_N=zero, sft_weight_N=zero)
    found = run_fused(replace(case, batch=batch), torch.float32)
    assert found.loss == 0
    assert not found.d_hidden.any()
    assert not found.d_weight.any()


def improbable(case: Case) -> Case:
    """Targets with a probability near 1e-30; every input is exact in fp32.

    Rounding a logit of -69 to fp32 would change the probability by a factor of 4e-6 for any
    algorithm. |log pi - log pi_old| of every target is .1.
    """
    hidden, weight = ((8 * x).round() / 8 for x in (case.hidden_NH, case.weight_VH))
    hidden[:, 0] = 1
    weight[case.batch.targets_N, 0] = -69.0
    targets, rows = case.batch.targets_N, len(hidden)
    log_p_NV = (hidden @ weight.T).log_softmax(-1)
    assert log_p_NV.gather(1, targets[:, None]).max() < -65
    gaps = torch.tensor([-0.1, 0.1]).double().repeat(rows)[:rows]
    old = target_logprob(log_p_NV, targets, case.objective.stop_ids) + gaps
    reference = replace(case.batch.reference, logprob_N=torch.full((rows,), -68.0).double())
    batch = replace(case.batch, old_logprob_N=old, reference=reference)
    rounded = cast_batch(cast_batch(batch, torch.float32, torch.float64), *2 * [torch.float64])
    return replace(case, hidden_NH=hidden, weight_VH=weight, batch=rounded)


def fused_in_blocks(case: Case, block_rows: int) -> tuple[torch.Tensor, ...]:
    hidden = case.hidden_NH.float().requires_grad_()
    weight = case.weight_VH.float().requires_grad_()
    vocab = len(weight)
    out = fused_loss(
        hidden,
        Head(weight, 0, vocab),
        cast_batch(case.batch, torch.float32, torch.float32),
        case.objective.terms,
        teacher_head=Head(case.teacher_weight_VH.float(), 0, vocab),
        reference_head=Head(case.reference_weight_VH.float(), 0, vocab),
        block_rows=block_rows,
    )
    return out.loss, *torch.autograd.grad(out.loss, (hidden, weight)), out.student_logprob_N


@every_variant
def test_loss_and_gradients_do_not_depend_on_the_block_size(variant):
    case = case_of(variant, 37, 61, seed=3)
    whole = fused_in_blocks(case, 37)
    for block_rows in (1, 36):
        for a, b in zip(whole, fused_in_blocks(case, block_rows), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_head_gradient_over_many_bf16_blocks_is_as_exact_as_over_one():
    """One block has an error of .17 %. With sums in bf16, 2,048 blocks had 71 %."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(2048, 4, generator=rng).bfloat16()
    weight = (0.1 * torch.randn(16, 4, generator=rng)).bfloat16()
    case = make_case(make_config(objective__name="sft"), 2048, 16)
    zero = torch.zeros(2048)
    batch = replace(
        cast_batch(case.batch, torch.float32, torch.float32),
        targets_N=torch.full((2048,), 3),
        pg_weight_N=zero,
        sft_weight_N=zero + 1 / 2048,
    )

    def gradient(dtype: torch.dtype, block_rows: int) -> torch.Tensor:
        head = Head(weight.to(dtype).requires_grad_(), 0, 16)
        out = fused_loss(hidden.to(dtype), head, batch, Terms(), block_rows=block_rows)
        return torch.autograd.grad(out.loss, head.weight_VH)[0][3].double()

    exact = gradient(torch.float64, 2048)
    errors = [
        float((gradient(torch.bfloat16, rows) - exact).norm() / exact.norm()) for rows in (2048, 1)
    ]
    assert errors[0] < 3e-3
    assert errors[1] < 1.2 * errors[0]


def test_a_bf16_head_adds_its_gradient_to_main_grad_in_fp32():
    case = case_of("opd", 29, 31, dtype=torch.bfloat16)
    expected = run_fused(case, torch.bfloat16)
    weight = case.weight_VH.to(torch.bfloat16).requires_grad_()
    weight.main_grad = torch.ones(weight.shape)
    batch = cast_batch(case.batch, torch.float32, torch.bfloat16)
    hidden = case.hidden_NH.to(torch.bfloat16).requires_grad_()
    case.objective(hidden, Head(weight, 0, 31), batch).loss.backward()
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(
        weight.main_grad.double() - 1, expected.d_weight, atol=1e-5, rtol=1e-2
    )


def select(batch: MicroBatch, rows: torch.Tensor) -> MicroBatch:
    """The micro-batch of some rows."""
    count = len(batch.targets_N)

    def pick(record):
        changes = {
            name: value[rows]
            for name, value in vars(record).items()
            if isinstance(value, torch.Tensor) and value.shape[:1] == (count,)
        }
        return replace(record, **changes)

    return replace(pick(batch), teacher=pick(batch.teacher), reference=pick(batch.reference))


@pytest.mark.parametrize("variant", ["opd_discounted", "gkd_jsd"])
def test_micro_batches_add_up_to_one_batch(variant):
    """Token weights hold the normaliser, so any split at sequence boundaries has the same sum."""
    case = case_of(variant, 24, 31, seed=4)
    whole = run_fused(case)
    first = (case.batch.sample_index_N % 2 == 0).nonzero()[:, 0].flip(0)
    second = (case.batch.sample_index_N % 2 == 1).nonzero()[:, 0]
    parts = [
        run_fused(replace(case, hidden_NH=case.hidden_NH[rows], batch=select(case.batch, rows)))
        for rows in (first, second)
    ]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    torch.testing.assert_close(parts[0].d_weight + parts[1].d_weight, whole.d_weight)
    torch.testing.assert_close(parts[0].d_hidden, whole.d_hidden[first])


def test_incoming_gradient_scales_and_a_frozen_head_has_no_gradient():
    case = case_of("opd_exact_kl")
    hidden = case.hidden_NH.clone().requires_grad_()
    heads = [Head(w, 0, 31) for w in (case.weight_VH, case.reference_weight_VH)]
    out = case.objective(hidden, heads[0], case.batch, reference_head=heads[1])
    (once,) = torch.autograd.grad(out.loss, hidden, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * out.loss, hidden)
    torch.testing.assert_close(thrice, 3 * once)
    torch.testing.assert_close(once, run_definition(case).d_hidden)
    assert heads[0].weight_VH.grad is None
    with torch.no_grad():
        assert not case.objective(
            hidden, heads[0], case.batch, reference_head=heads[1]
        ).loss.requires_grad


BATCH = make_case(make_config(), rows=4).batch


def test_heads_that_do_not_fit_are_refused():
    case = case_of("opd_vopd")
    head, narrow = Head(case.weight_VH, 0, 31), Head(case.teacher_weight_VH, 0, 30)
    with pytest.raises(ValueError, match=r"0\.\.31 of 31 .* 0\.\.30 of 30 for the teacher"):
        case.objective(case.hidden_NH, head, case.batch, teacher_head=narrow)


def output_of(**changes: torch.Tensor) -> LossOutput:
    rows = {name: torch.zeros(4) for name in LossOutput.__dataclass_fields__}
    return LossOutput(**rows | changes)


BAD = torch.tensor([0.0, 0.0, math.inf, math.nan])
BAD_TOP_K = Scores(None, topk_logprobs_NK=torch.stack([BAD, torch.zeros(4)], 1))


@pytest.mark.parametrize(
    ("name", "batch", "rows", "count"),
    [
        ("the teacher's log-probabilities", {}, {"teacher_logprob_N": BAD}, "2 of 4"),
        ("the teacher's top-k log-probabilities", {"teacher": BAD_TOP_K}, {}, "2 of 8"),
        ("the teacher's entropies", {}, {"teacher_entropy_N": BAD}, "2 of 4"),
        ("the reference's log-probabilities", {}, {"reference_logprob_N": BAD}, "2 of 4"),
        ("the old log-probabilities", {"old_logprob_N": BAD}, {}, "2 of 4"),
        ("the old log-probabilities of tokens", {"old_token_logprob_N": BAD}, {}, "2 of 4"),
        ("the given advantages", {"given_advantage_N": BAD}, {}, "2 of 4"),
    ],
)
def test_the_message_of_non_finite_scores(name, batch, rows, count):
    expected = (
        f"{name}: {count} values are not finite, the first in scored row 2: no weight was moved. "
        "Check that model's checkpoint, its precision and its server"
    )
    require_finite_scores(BATCH, output_of())
    with pytest.raises(UserError, match=f"^{re.escape(expected)}$"):
        require_finite_scores(replace(BATCH, **batch), output_of(**rows))
