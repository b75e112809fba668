"""Which prompts, samples and rollouts a rank draws, and who grades them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from stable_opd_mcore.config.schema import TokenMasksConfig
from stable_opd_mcore.data.golden import off_policy_draws
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.host.user_code import read_user_function
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.samples import drawing
from tests.parallel.launch import run_ranks
from tests.train.engine_recorder import Recorder
from tests.train.runs import tiny_config


def test_an_objective_without_rollouts_draws_none(run):
    engine = Recorder(run.engine)
    sft = replace(run, engine=engine, objective=SimpleNamespace(needs_rollouts=False))
    prompts = drawing.own_prompts(sft, drawing.rows_of_step(sft, TrainState()))
    assert drawing.draw_rollouts(sft, prompts, 0) == []
    assert engine.calls == []


def test_prefetch_asks_for_the_prompts_of_this_rank_step_by_step(run):
    rollout = SimpleNamespace(max_staleness=2, prompts_per_step=3)
    steps = SimpleNamespace(steps=5)
    config = SimpleNamespace(rollout=rollout, train=steps, sampling=run.config.sampling)
    world = SimpleNamespace(data_rank=1, data_size=2)
    engine = Recorder(run.engine)
    ahead = replace(run, config=config, world=world, engine=engine)
    drawing.prefetch_rollouts(ahead, TrainState(step=3, cursor=6, weight_version=7))
    ids = [p.prompt_id for p in run.prompts.select(run.order.indices(6, 6))]
    assert engine.calls == [  # step 4 is the last one
        ("prefetch", [ids[1]], run.sampling, 3, 7),
        ("prefetch", [ids[4]], run.sampling, 4, 8),
    ]
    rollout.max_staleness = 0
    drawing.prefetch_rollouts(ahead, TrainState(step=3, cursor=6))
    assert len(engine.calls) == 2


def test_samples_have_the_masks_golden_solutions_and_off_policy_marks_of_the_objective(run):
    prompts = run.prompts.select(run.order.indices(0, 8))
    rollouts = [
        Rollout(p, k, p.golden_token_ids, (0.0,) * len(p.golden_token_ids), "length", 0)
        for p in prompts
        for k in range(2)
    ]
    masks = TokenMasksConfig(truncated_rollouts=True)
    settings = SimpleNamespace(on_policy_fraction=0.5, masks=masks)
    rollout = SimpleNamespace(prompts_per_step=8)
    config = SimpleNamespace(
        objective=settings,
        train=SimpleNamespace(seed=3),
        rollout=rollout,
        sampling=run.config.sampling,
    )
    objective = SimpleNamespace(needs_golden=True)
    gkd = replace(run, config=config, objective=objective)
    samples = drawing.rollouts_as_samples(gkd, prompts, rollouts, 8)
    golden = drawing.golden_solutions(gkd, prompts, 8)
    assert [s.source for s in samples + golden] == ["rollout"] * 16 + ["golden"] * 8
    assert not any(any(s.trained) for s in samples[:16])
    marks = off_policy_draws(8, 8, 0.5, 3)
    assert marks != off_policy_draws(8, 8, 0.5, 0)
    assert [s.off_policy for s in samples] == [m for m in marks for _ in range(2)]
    assert [s.off_policy for s in golden] == marks
    second = replace(gkd, world=SimpleNamespace(data_rank=1, data_size=2))
    own = drawing.golden_solutions(second, prompts[1::2], 8)
    assert [s.off_policy for s in own] == marks[1::2]
    settings.on_policy_fraction = 1
    assert not any(s.off_policy for s in drawing.golden_solutions(gkd, prompts, 8))
    objective.needs_golden = False
    assert drawing.golden_solutions(gkd, prompts, 8) == []


class Grades:
    """Grades with this rank's number."""

    def __init__(self, rank: int):
        self.rank = rank

    def grade_rollouts(self, rollouts, by_source):
        return [replace(rollout, reward=float(self.rank)) for rollout in rollouts]


class Draws:
    def __init__(self, rank: int):
        self.rank = rank

    def generate(self, prompts, sampling, *, step):
        return [
            Rollout(p, k, (step,), (0.0,), "stop", self.rank, text="[3]")
            for p in prompts
            for k in range(sampling.num_samples)
        ]


def draw_on_two_ranks(rank: int, _world_size: int, directory: Path) -> None:
    """As two replicas: each grades its own. As one: rank 0 grades, others take its verdicts."""
    sampling = SimpleNamespace(num_samples=2)
    for tensor in (1, 2):
        config = tiny_config(directory, "draw", parallel={"tensor": tensor})
        world = start_world(config.parallel, 0)
        share = drawing.own_share(world, "abc")
        assert share == ("abc" if tensor == 2 else "ac" if rank == 0 else "b")
        prompts = [Prompt(name, "", ()) for name in share]
        drawn = drawing.draw_graded(Draws(rank), Grades(rank), world, prompts, sampling, 5)
        assert [(r.prompt.prompt_id, r.sample_index) for r in drawn] == [
            (name, k) for name in share for k in range(2)
        ]
        assert {rollout.reward for rollout in drawn} == {rank if tensor == 1 else 0}
        stop_world()


def test_each_replica_draws_its_share_and_one_rank_of_it_grades(tmp_path):
    run_ranks(2, draw_on_two_ranks, tmp_path)


def test_a_source_s_reward_judges_no_held_out_problem_of_a_file_of_the_same_name(run, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def reward(row, response): return row['worth']")
    function = read_user_function(f"{own}:reward", ("row", "response"))
    prompt = Prompt("math.jsonl:1", "1+2", (1,), "3", answer_format="bracket")
    engine, once = Draws(0), SimpleNamespace(num_samples=1)
    with Grader(rewards={"math.jsonl": function}) as grader:
        trained = [replace(prompt, columns={"worth": 0.25})]
        (rollout,) = drawing.graded(
            grader, run.world, trained, engine.generate(trained, once, step=0)
        )
        assert rollout.reward == 0.25
        (held_out,) = drawing.draw_graded(engine, grader, run.world, [prompt], once, step=0)
        assert (held_out.reward, held_out.grading_failure) == (1.0, None)
