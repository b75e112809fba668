"""Which samples a rank collects, and who grades them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from stable_opd_mcore.config.objective_settings import TokenMasksConfig
from stable_opd_mcore.config.prefix_settings import PrefixConfig
from stable_opd_mcore.data.samples import off_policy_slots
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.evaluation.grading import Grader
from stable_opd_mcore.host.user_code import read_user_function
from stable_opd_mcore.inputs.restarts import restart_problem
from stable_opd_mcore.monitoring.throughput import PhaseTimer
from stable_opd_mcore.parallel.world import start_world, stop_world
from stable_opd_mcore.records import Prompt, Rollout, Turn
from stable_opd_mcore.train.held_out import sample_held_out
from stable_opd_mcore.train.persistence.state import TrainState
from stable_opd_mcore.train.samples import collecting
from stable_opd_mcore.train.samples.failed_episodes import refuse_episodes
from tests.losses.cases import make_config
from tests.parallel.launch import run_ranks
from tests.train.engine_recorder import Recorder
from tests.train.runs import tiny_config


def test_an_objective_without_rollouts_samples_none(run):
    engine = Recorder(run.engine)
    sft = replace(run, engine=engine, objective=SimpleNamespace(needs_rollouts=False))
    assert collecting.sample_rollouts(sft, [], 0, PhaseTimer()) == []
    assert engine.calls == []


def test_prefetch_asks_for_the_prompts_of_this_rank_step_by_step(run):
    rollout = SimpleNamespace(max_staleness=2, prompts_per_step=3, prefix=PrefixConfig())
    steps = SimpleNamespace(steps=5, seed=0)
    parts = {"train": steps, "sampling": run.config.sampling, "longest_turn": 24}
    config = SimpleNamespace(rollout=rollout, **parts)
    world = SimpleNamespace(data_rank=1, data_size=2)
    engine = Recorder(run.engine)
    ahead = replace(run, config=config, world=world, engine=engine)
    collecting.prefetch_rollouts(ahead, TrainState(step=3, cursor=6, weight_version=7))
    ids = [p.prompt_id for p in run.prompts.select(run.order.indices(6, 6))]
    assert engine.calls == [  # step 4 is the last one
        ("prefetch", [ids[1]], replace(run.sampling, training_step=3), 3, 7),
        ("prefetch", [ids[4]], replace(run.sampling, training_step=4), 4, 8),
    ]
    rollout.max_staleness = 0
    collecting.prefetch_rollouts(ahead, TrainState(step=3, cursor=6))
    assert len(engine.calls) == 2


def test_samples_have_the_masks_slots_and_off_policy_marks_of_the_objective(run):
    """Rollouts are prepared; all count as truncated, so a mask takes all their tokens."""
    masks = TokenMasksConfig(truncated_rollouts=True)
    sections = {
        "objective": {"on_policy_fraction": 0.5, "masks": masks},
        "train": {"seed": 3},
        "rollout": {"prompts_per_step": 8},
    }
    changes = {
        name: getattr(run.config, name).model_copy(update=fields)
        for name, fields in sections.items()
    }
    config = run.config.model_copy(update=changes)
    one = SimpleNamespace(needs_golden=True)
    objective = SimpleNamespace(each=[one], needs_rollouts=True)
    gkd = replace(run, config=config, objective=objective)

    def collected(run):
        def answer(run, prompts, *_):
            ids = [prompt.golden_token_ids for prompt in prompts for _ in range(2)]
            both = zip(ids, [prompt for prompt in prompts for _ in range(2)], strict=True)
            return [Rollout(p, 0, ids, (0.0,) * len(ids), "length", 0) for ids, p in both]

        with patch.object(collecting, "sample_rollouts", answer):
            return collecting.collect_samples(run, TrainState(cursor=8), PhaseTimer())[1]

    samples = collected(gkd)
    assert [s.kind for s in samples] == ["rollout"] * 16 + ["golden"] * 8
    assert not any(any(s.trained) for s in samples[:16])
    assert [s.slot for s in samples[16:]] == [*range(8, 16)]
    marks = off_policy_slots(8, 8, 0.5, 3)
    assert marks != off_policy_slots(8, 8, 0.5, 0)
    assert all(s.off_policy == (s.slot in marks) for s in samples)
    second = collected(replace(gkd, world=replace(gkd.world, data_rank=1, data_size=2)))
    assert [s.slot for s in second[8:]] == [9, 11, 13, 15]
    assert [s.prompt_id for s in second[8:]] == [s.prompt_id for s in samples[17::2]]
    changes["objective"] = run.config.objective
    everywhere = replace(gkd, config=run.config.model_copy(update=changes))
    assert not any(s.off_policy for s in collected(everywhere))
    one.needs_golden = False
    assert {s.kind for s in collected(gkd)} == {"rollout"}


class Grades:
    """Grades with this rank's number."""

    def __init__(self, rank: int):
        self.rank = rank

    def grade_rollouts(self, rollouts, by_source):
        return [replace(rollout, reward=float(self.rank)) for rollout in rollouts]


class Answers:
    interaction = None

    def __init__(self, rank: int):
        self.rank = rank

    def generate(self, prompts, sampling, *, step):
        return [
            Rollout(p, k, (step,), (0.0,), "stop", self.rank, text="[3]")
            for p in prompts
            for k in range(sampling.num_samples)
        ]


def sample_on_two_ranks(rank: int, _world_size: int, directory: Path) -> None:
    """As two replicas: each grades its own. As one: rank 0 grades, others take its verdicts."""
    sampling = SimpleNamespace(num_samples=2)
    for tensor in (1, 2):
        config = tiny_config(directory, "sample", parallel={"tensor": tensor})
        world = start_world(config.parallel, 0)
        share = collecting.own_share(world, "abc")
        assert share == ("abc" if tensor == 2 else "ac" if rank == 0 else "b")
        prompts = [Prompt(name, "", ()) for name in share]
        rollouts = sample_held_out(Answers(rank), Grades(rank), world, prompts, sampling)
        assert [(r.prompt.prompt_id, r.sample_index) for r in rollouts] == [
            (name, k) for name in share for k in range(2)
        ]
        assert {rollout.reward for rollout in rollouts} == {rank if tensor == 1 else 0}
        stop_world()
    refuse_on_every_rank(rank, directory)


def refuse_on_every_rank(rank: int, directory: Path) -> None:
    """Episodes on rank 1 end both ranks, which would else wait for each other."""
    function = directory / f"game{rank}.py"
    function.write_text("def play(row, seed):\n    yield 'on'\n    return 1.0\n")
    config = tiny_config(
        directory, "game", environment={"function": f"{function}:play"}, objective={"discount": 0.9}
    )
    played = Rollout(
        Prompt("p", "", (1, 2), environment=""), 0, (3, 4), (-1, -1), "stop", 0, text=""
    )
    turns = tuple(Turn(1, "stop", (7,), restarts=bool(each)) for each in (0, rank))
    engine = SimpleNamespace(first_failure="boom" if rank else None, refusal=None)
    run = SimpleNamespace(config=config, engine=engine)
    failing = [replace(played, grading_failure="error")] * 2 * rank
    for own, said in (([replace(played, turns=turns)], "begins a new"), (failing, "one: boom")):
        with pytest.raises(UserError, match=said):
            refuse_episodes(run, own)
    refuse_episodes(run, [played])
    engine.refusal = "no tools" if rank else None
    with pytest.raises(UserError, match="no tools"):
        refuse_episodes(run, [played])
    engine.interaction = SimpleNamespace(environments={"": config.environment})
    engine.generate = lambda *_, step: []
    world = start_world(config.parallel, 0)
    prompts, sampling = [played.prompt], SimpleNamespace(num_samples=1)
    grades = Grades(rank)
    cases = (
        ("no tools", None, "no tools"),
        (None, "crash", "2 of 2 episodes of held-out rows.* row p "),
    )
    for refusal, failure, message in cases:
        engine.refusal = refusal
        engine.generate = lambda *_, step, f=failure: [replace(played, grading_failure=f)]
        with pytest.raises(UserError, match=message):
            sample_held_out(engine, grades, world, prompts, sampling)
    stop_world()


def test_each_replica_samples_its_share_and_one_rank_of_it_grades(tmp_path):
    run_ranks(2, sample_on_two_ranks, tmp_path)


def test_a_source_s_reward_judges_no_held_out_problem_of_a_file_of_the_same_name(run, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def reward(row, response): return row['worth']")
    function = read_user_function(f"{own}:reward", ("row", "response"))
    prompt = Prompt("math.jsonl:1", "1+2", (1,), "3", answer_format="bracket")
    engine, once = Answers(0), SimpleNamespace(num_samples=1)
    with Grader(rewards={"math.jsonl": function}) as grader:
        trained = [replace(prompt, columns={"worth": 0.25})]
        (rollout,) = collecting.graded(
            grader, run.world, trained, engine.generate(trained, once, step=0)
        )
        assert rollout.reward == 0.25
        (held_out,) = sample_held_out(engine, grader, run.world, [prompt], once)
        assert (held_out.reward, held_out.grading_failure) == (1.0, None)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({}, []),
        ({"objective__discount": 0.5}, ["later"]),
        ({"teacher__prompt": "{{ problem }}"}, ["at once", "later"]),
    ],
)
def test_settings_that_assume_one_context_refuse_others(settings, refused):
    config = make_config(**settings)
    for name, *restarts in (("never", 0, 0), ("at once", 1, 0), ("later", 0, 1)):
        turns = [Turn(1, "stop", (7,), restarts=bool(each)) for each in restarts]
        rollout = Rollout(
            Prompt(name, "", (1, 2)), 0, (3, 4), (-1, -1), "stop", 0, turns=tuple(turns)
        )
        problem = restart_problem(config, [rollout])
        assert (problem is not None) == (name in refused)
        assert problem is None or problem.startswith(f"prompt {name}: its environment begins a new")
