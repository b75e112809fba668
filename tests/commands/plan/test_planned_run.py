"""How many tokens a rank has in a step, a minibatch and a micro-batch."""

import pytest

from stable_opd_mcore.commands.plan.plan import Plan
from stable_opd_mcore.commands.plan.planned_run import PlannedRun, Work, planned_run
from stable_opd_mcore.data.samples import off_policy_slots
from stable_opd_mcore.placement.hardware import Cluster
from tests.commands.plan.cases import NODE, config_7b
from tests.shares import pack_share, sample_of, weights_of

GAME = "def episode(row, seed):\n    yield None\n    return 1\n"
GKD = ("objective.name=gkd", "objective.on_policy_fraction=0.5")


def test_a_micro_batch_is_no_larger_than_a_ranks_share(tmp_path):
    counts = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "mixture.lambda=0")

    def run(*overrides: str, cluster: Cluster = NODE) -> PlannedRun:
        config = config_7b(tmp_path, *counts, "sampling.max_new_tokens=1024", *overrides)
        return planned_run(config, cluster, work=Work(prompt_tokens=256, response_tokens=768))

    assert run().sequences == 24
    mixed = run("mixture.lambda=0.5")
    assert (mixed.sequences, mixed.scored) == (24 + 6, 24)
    assert (mixed.micro_batch_tokens, mixed.num_micro_batches) == (12 * 1024, 2)
    assert (run(*GKD).sequences, run(*GKD).scored) == (24 + 6, 24 + 3)
    several = run("train.micro_batch_tokens=4096")
    assert (several.micro_batch_tokens, several.num_micro_batches) == (4096, 3)
    one = run("train.micro_batch_tokens=65536")
    assert one.micro_batch_tokens == 12 * 1024 == one.largest_share
    assert one.num_micro_batches == 1
    shared = run("train.share_prefixes=true")  # 12 sequences of 3 prompts
    assert shared.micro_batch_tokens == 12 * 768 + 3 * 256
    assert run("train.minibatches=3").largest_share == 4 * 1024
    # A sequence longer than the mean has a micro-batch of its own.
    eight = run("train.minibatches=6", "parallel.tensor=1", "parallel.sequence=false")
    assert eight.largest_share == 2 * 1024


def test_episodes_have_several_turns_of_tokens_up_to_the_window(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    game = (f"environment.function={tmp_path}/game.py:episode", "sampling.max_new_tokens=512")

    def run(turns: int, *more: str) -> PlannedRun:
        settings = (f"environment.max_turns={turns}", "student.window=4096", *more)
        return planned_run(config_7b(tmp_path, *game, *settings), NODE)

    assert run(1).work == Work(response_tokens=256)
    assert run(1).longest == 256 + 512
    few = run(4)  # two of the four turns are played on average
    assert few.work == Work(response_tokens=2 * 256, observed_tokens=256)
    assert (few.longest, few.longest_sampled) == (256 + 4 * 512 + 3 * 256, 4 * 512)
    many = run(40)
    assert many.work.tokens == many.longest == 4096
    assert many.longest_sampled == 4096 - 256
    assert many.response_rows == many.sequences * many.work.response_tokens
    assert "observed tokens of an episode" in Plan(many).table()
    short = run(4, "environment.max_new_tokens=64")  # instead of sampling.max_new_tokens
    assert short.work == Work(response_tokens=2 * 32, observed_tokens=256)
    assert short.longest_sampled == 4 * 64
    columns = "data.train.columns={messages: messages, golden: all}"
    begun = run(1, columns, "rollout.prefix={by: golden, share: 0.5, last: 2}")
    # half of the rollouts begin with one golden turn on average, at most with two
    assert begun.work == Work(response_tokens=256, observed_tokens=(256 + 256) // 2)
    assert begun.longest == 256 + 512 + 2 * (512 + 256)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("mixture.lambda=0",), [3]),
        (("mixture.lambda=0.5",), [3, 1]),
        (("mixture.lambda=0.5", "parallel.virtual_pipeline=2"), [4, 4]),
        (("mixture.lambda=0.5", "train.micro_batch_tokens=2048"), [6, 2]),
        (
            ("mixture.lambda=0.5", "train.micro_batch_tokens=2048", "parallel.virtual_pipeline=2"),
            [8, 4],
        ),
        (("mixture.lambda=0.5", "train.micro_batch_tokens=65536"), [1, 1]),
        (("objective.name=sft",), [1]),
        (GKD, [4, 1]),  # a rank has 14 and 13 scored sequences, 2 and 1 others
        ((*GKD, "parallel.virtual_pipeline=2"), [4, 4]),
    ],
)
def test_a_rank_has_the_micro_batches_that_packing_makes(tmp_path, settings, expected):
    """Two ranks of four stages; a micro-batch has room for whole sequences."""
    layout = ("parallel.pipeline=4", "parallel.tensor=1", "parallel.sequence=false")
    counts = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "mixture.lambda=0")
    lengths = ("sampling.max_new_tokens=768", "train.micro_batch_tokens=4096")
    config = config_7b(tmp_path, *layout, *counts, *lengths, *settings)
    run = planned_run(config, NODE, work=Work(prompt_tokens=256, response_tokens=768))
    off_policy = off_policy_slots(0, 6, config.objective.on_policy_fraction, seed=0)
    rollouts = [("rollout", prompt) for prompt in range(run.rollouts // 4) for _ in range(4)]
    golden = [("golden", prompt) for prompt in range(run.golden)]
    samples = [
        sample_of(kind, f"p:{i}", (1,) * 256, (2,) * 768, off_policy=i in off_policy)
        for kind, i in rollouts + golden
    ]
    for rank in range(2):
        batches = pack_share(
            samples,
            weights_of(samples),
            rank,
            2,
            max_tokens=config.train.micro_batch_tokens,
            microbatch_multiple=4 if config.parallel.virtual_pipeline else 1,
        )
        scored = sum(batch.is_scored for batch in batches)
        packed = [count for count in (scored, len(batches) - scored) if count]
        assert (
            packed == [run.num_micro_batches_of(sequences) for sequences in run.kinds] == expected
        )
