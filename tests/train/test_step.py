"""The parts of one training step, and the updates of a whole one."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from stable_opd_mcore.config.guard_settings import GuardConfig
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.objective_settings import KLConfig, MixtureConfig
from stable_opd_mcore.config.training import Fp8Config
from stable_opd_mcore.data.responses import rollout_metrics
from stable_opd_mcore.data.samples import golden_samples, rollout_samples
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.losses.objectives import Objective
from stable_opd_mcore.metrics import Mean, Metrics, Same, Sum
from stable_opd_mcore.monitoring.health import sample_metrics
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.rollout.engine import Sampling
from stable_opd_mcore.train import step
from stable_opd_mcore.train.learning_rate import learning_rate
from stable_opd_mcore.train.oversight.guard import GuardState
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.samples import overlap, sharing
from stable_opd_mcore.train.samples.collecting import collect_samples
from stable_opd_mcore.train.step_metrics import compare_models, reduce_row_metrics, step_metrics
from stable_opd_mcore.train.student import Student
from stable_opd_mcore.train.update import update_once
from tests.config.test_load import SMOKE
from tests.parallel.launch import run_ranks
from tests.shares import facts_of
from tests.train.engine_recorder import Recorder
from tests.train.runs import tiny_config


def collected(run, cursor=0):
    """Rollouts, samples and facts of one step."""
    rollouts, samples = collect_samples(run, TrainState(cursor=cursor), PhaseTimer())
    return rollouts, samples, step.facts_of_step(run, samples)


def scored_step(run, cursor=0):
    """The minibatches of one step and their scored micro-batches."""
    minibatches = step.minibatches_of(run, *collected(run, cursor)[1:])
    return minibatches, step.score(run, minibatches, 1)[0]


def weights_of(student: Student) -> torch.Tensor:
    """A copy of all weights, in one vector."""
    return torch.cat([p.detach().flatten() for chunk in student.chunks for p in chunk.parameters()])


def test_a_step_samples_at_its_cursor_updates_and_publishes(run):
    engine, before = Recorder(run.engine), weights_of(run.student)
    timed: list[str] = []
    phase = PhaseTimer.phase

    def noted(timer, name):
        timed.append(name)
        return phase(timer, name)

    with (
        patch.object(PhaseTimer, "phase", noted),
        patch.object(overlap, "EVERY", 4),
        patch.object(step, "collect_samples", wraps=collect_samples) as collect,
    ):
        result = step.train_step(replace(run, engine=engine), TrainState(3, 6, 5, 7))
    assert collect.call_args.args[1] == TrainState(3, 6, 5, 7)
    ids = [p.prompt_id for p in run.prompts.select(run.order.indices(6, 2))]
    sampling = replace(run.sampling, training_step=3)
    assert engine.calls == [("generate", ids, sampling, 3), ("publish", 8)]
    assert timed == ["rollout", "score", "update", "sync"]
    assert [r.prompt.prompt_id for r in result.rollouts] == [ids[0]] * 2 + [ids[1]] * 2
    assert {r.reward for r in result.rollouts} <= {0.0, 1.0}
    assert replace(result.state, guard=GuardState()) == TrainState(4, 8, 7, 8)
    length = result.metrics["rollout/response_length_mean"].value()
    assert result.state.guard.watched["length"].recent == (length,)  # the guard has seen the step
    assert not torch.equal(weights_of(run.student), before)

    lr = learning_rate(3, 10, run.config.optimizer)
    assert lr not in {learning_rate(n, 10, run.config.optimizer) for n in (2, 4)}
    assert result.metrics["optimizer/lr"] == Same(lr)
    assert result.metrics["engine/noted"] == Sum(1)
    assert result.metrics["grad_norm"].count == 2
    assert {"time/total", "overlap/ratio", "rollout/grading_timeouts"} <= result.metrics.keys()
    expected = rollout_metrics(result.rollouts, 24)
    assert {key: result.metrics[key] for key in expected} == dict(expected)
    prompts = run.prompts.select(run.order.indices(6, 2))
    samples = rollout_samples(result.rollouts, max_new_tokens=24) + golden_samples(prompts)
    expected = sample_metrics(facts_of(samples))
    assert {key: result.metrics[key] for key in expected} == dict(expected)
    tokens = sum(len(sample.token_ids) for sample in samples)
    assert result.metrics["throughput/tokens_per_second"].total == tokens

    odd = step.train_step(replace(run, engine=Recorder(run.engine)), TrainState(4, 8, 0, 8))
    assert not any(key.startswith("overlap/") for key in odd.metrics)


def test_a_step_takes_the_larger_of_the_configs_and_the_guards_loss_weights(run):
    assert (run.config.kl.beta, run.config.mixture.lambda_) == (0.1, 0.5)
    strong = GuardState(measure="raised", beta=0.4, lambda_=0.2)

    def at(guard, policy="act", **changes):
        config = run.config.model_copy(update={"guard": GuardConfig(policy=policy), **changes})
        return step.at_step(replace(run, config=config), TrainState(guard=guard))

    objective = at(strong).objective
    assert (objective.beta, objective.golden_weight) == (0.4, 0.5)
    assert at(strong, policy="warn").objective == run.objective
    objective = at(replace(strong, beta=0.0, lambda_=0.9)).objective
    assert (objective.beta, objective.golden_weight) == (0.1, 0.9)
    plain = {"kl": KLConfig(), "mixture": MixtureConfig()}
    without = at(GuardState(), **plain)
    assert without.reference is None
    assert not without.objective.needs_golden
    assert at(strong, **plain).reference is run.reference


def test_the_length_budget_grows_and_the_guard_rests_until_it_is_whole(run):
    growing = run.config.sampling.model_copy(update={"horizon_start": 4, "horizon_steps": 5})
    config = run.config.model_copy(update={"sampling": growing})
    grown = replace(run, config=config, engine=Recorder(run.engine))
    budgets = [step.at_step(grown, TrainState(n)).sampling.max_new_tokens for n in (0, 2, 5, 9)]
    assert budgets == [4, 12, 24, 24]
    result = step.train_step(grown, TrainState(1, 0, 1, 1))
    assert max(len(rollout.token_ids) for rollout in result.rollouts) == 8
    assert result.metrics["rollout/max_new_tokens"] == Same(8)
    assert result.state.guard == GuardState()
    assert step.adapted_and_guarded(config, TrainState(6), result.metrics)[0].guard != GuardState()


def one_minibatch(run):
    """The run with one minibatch a step."""
    train = run.config.train.model_copy(update={"minibatches": 1})
    return replace(run, config=run.config.model_copy(update={"train": train}))


def test_a_step_ends_with_the_adapted_weights():
    config = load_config(SMOKE, ["kl.beta=0.1", "kl.target=0.2"])
    state, _ = step.adapted_and_guarded(
        config, TrainState(), Metrics({"kl/reference": Mean(0.22, 1)})
    )
    assert state.adapted.beta == pytest.approx(0.1 * 1.01)


@pytest.mark.parametrize(
    ("replayed", "fp8", "expected"),
    [
        (True, None, {"routing": (2, 3), "pad_to_multiple": 1}),
        (False, "tensorwise", {"routing": None, "pad_to_multiple": 16}),
    ],
)
def test_routing_is_packed_for_replay_and_tokens_are_padded_for_fp8(run, replayed, fp8, expected):
    (minibatch,) = step.minibatches_of(one_minibatch(run), *collected(run)[1:])
    experts = SimpleNamespace(per_token=3)
    architecture = SimpleNamespace(num_layers=2, experts=experts, attention_length=9.0)
    rollout = run.config.rollout.model_copy(update={"routing_replay": replayed})
    changes = {"rollout": rollout, "fp8": Fp8Config(teacher=fp8)}
    config = run.config.model_copy(update=changes)
    student = SimpleNamespace(chunks=[SimpleNamespace(architecture=architecture)])
    with patch.object(sharing, "pack", return_value=[]) as pack:
        step.pack_minibatch(replace(run, config=config, student=student), minibatch)
    assert {key: pack.call_args.kwargs[key] for key in expected} == expected


def test_models_are_compared_over_all_minibatches_every_few_steps(run):
    minibatches, scored = scored_step(run)
    both = compare_models(run, scored, minibatches, 10)
    pairs = zip(scored, minibatches, strict=True)
    each = [compare_models(run, [batches], [part], 10) for batches, part in pairs]
    assert both == each[0] | each[1]
    assert both["overlap/ratio"].count > each[0]["overlap/ratio"].count > 0
    assert not compare_models(run, scored, minibatches, 9)
    assert not compare_models(replace(run, overlap=None), scored, minibatches, 10)
    with pytest.raises(ValueError, match="shorter"):
        compare_models(run, scored, minibatches[:1], 10)


def test_mismatch_is_corrected_as_configured(run):
    _, scored = scored_step(run)
    batches = [
        [replace(b, old_token_logprob_N=b.rollout_logprob_N + 1.0) for b in part] for part in scored
    ]
    settings = SimpleNamespace(
        importance_correction="none", importance_threshold=2.0, max_staleness=0
    )
    kl = SimpleNamespace(estimator="exact")
    one = replace(run, config=SimpleNamespace(rollout=settings, kl=kl))
    same, metrics = step.correct_mismatch(one, batches)
    assert same is batches
    assert not metrics
    settings.max_staleness = 1
    stale, metrics = step.correct_mismatch(one, batches)
    assert not metrics
    for batch in [b for part in stale for b in part]:
        assert torch.equal(batch.old_token_logprob_N, batch.rollout_logprob_N)
        assert batch.old_logprob_N is None
    settings.importance_correction = "truncated"
    for kl.estimator, factor in (("exact", 1), ("k3", 2), ("k3+", 2)):
        corrected, metrics = step.correct_mismatch(one, batches)
        for part, originals in zip(corrected, batches, strict=True):
            for batch, original in zip(part, originals, strict=True):
                torch.testing.assert_close(batch.pg_weight_N, 2 * original.pg_weight_N)
                torch.testing.assert_close(batch.kl_weight_N, factor * original.kl_weight_N)
    trained = sum(int((b.pg_weight_N != 0).sum()) for part in batches for b in part)
    assert metrics["importance/weight_mean"] == Mean(2.0 * trained, trained)


def test_an_update_reports_means_of_its_losses_and_sums_of_the_rest(run):
    _, (batches, _) = scored_step(run)
    outputs, metrics = update_once(run, batches, 0.25, 9)
    assert len(outputs) == len(batches)
    assert metrics["optimizer/lr"] == Same(0.25)
    assert metrics["grad_norm"] == Mean(run.student._grad_norm, 1)
    assert metrics["grad_norm"].total > 0
    for key in ("loss/total", "loss/pg", "loss/kl", "loss/sft"):
        assert metrics[key].count == 1
    assert isinstance(metrics["tokens/trained"], Sum)
    assert run.student.optimizer.param_groups[0]["lr"] == 0.25


class NotFinite(Objective):
    """An objective whose loss is NaN, like that of a student whose hidden states are."""

    def __call__(self, hidden, *args, **kwargs):
        return super().__call__(hidden * torch.nan, *args, **kwargs)


def test_non_finite_numbers_stop_the_step_that_made_them(run):
    before = weights_of(run.student)
    each = tuple(NotFinite(**vars(one)) for one in run.objective.each)
    bad = replace(run, engine=Recorder(run.engine), objective=replace(run.objective, each=each))
    with pytest.raises(UserError, match=r"^step 4: loss/\w+=.*, grad_norm=nan: not finite"):
        step.train_step(bad, TrainState(3, 0, 0, 0))
    assert torch.equal(weights_of(run.student), before)
    assert ("publish", 1) not in bad.engine.calls

    _, (batches, _) = scored_step(run)
    kept = [{k: v.clone() for k, v in c.named_parameters()} for c in run.student.chunks]
    with pytest.raises(UserError, match=r"^step 9: nothing is saved .* NaN.*lower optimizer\.lr"):
        update_once(run, batches, float("inf"), 9)
    with torch.no_grad():
        for chunk, weights in zip(run.student.chunks, kept, strict=True):
            for name, weight in chunk.named_parameters():
                weight.copy_(weights[name])


def measure_on_two_ranks(rank: int, _world_size: int, directory: Path) -> None:
    """Two replicas have rollouts of their own, two tensor-parallel ranks the same ones."""
    for tensor in (1, 2):
        ahead = {"max_staleness": tensor - 1}
        config = tiny_config(directory, "measure", parallel={"tensor": tensor}, rollout=ahead)
        world = start_world(config.parallel, 0)
        counted = reduce_row_metrics(world, Metrics({"rows": Sum(3)}))
        assert counted == Metrics({"rows": Sum(6 if tensor == 1 else 3)})
        own = SimpleNamespace(take_metrics=lambda *_: Metrics({"engine/noted": Sum(1)}))
        objective = SimpleNamespace(needs_rollouts=True, beta=0.0, golden_weight=0.0)
        parts = {"engine": own, "objective": objective, "world": world, "config": config}
        sampling = Sampling(max_new_tokens=8)
        run = SimpleNamespace(**parts, sampling=sampling, rollout_prompts=None)
        names = "abcd" if tensor == 2 else "ac" if rank == 0 else "bd"
        own = [Rollout(Prompt(n, "", ()), 0, (5,), (0.0,), "stop", 0, reward=0.0) for n in names]
        metrics = step_metrics(run, own, facts_of([]), PhaseTimer(), trained_version=1)
        assert metrics["engine/noted"] == Sum(2)
        assert metrics["rollout/response_length_mean"] == Mean(4, 4)
        assert ("perf/staleness_1" in metrics) == (tensor == 2)
        stop_world()


def test_metrics_count_a_replica_once(tmp_path):
    run_ranks(2, measure_on_two_ranks, tmp_path)
