"""How many tokens a rank has in a step, a minibatch and a micro-batch."""

from __future__ import annotations

from stable_opd_mcore.planning.layout import Layout
from stable_opd_mcore.planning.work import (
    Work,
    largest_share,
    micro_batch_tokens,
    num_micro_batches,
)
from tests.planning.cases import config_7b

LAYOUT = Layout(8, tensor=4, sequence=True)
WORK = Work(prompt_tokens=256, response_tokens=768)


def test_a_micro_batch_is_no_larger_than_a_ranks_share(tmp_path):
    drawn = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "mixture.lambda=0")

    def config(*overrides: str):
        return config_7b(tmp_path, *drawn, "sampling.max_new_tokens=1024", *overrides)

    assert WORK.sequences(config()) == 24
    assert WORK.sequences(config("mixture.lambda=0.5")) == 24 + 6
    assert micro_batch_tokens(config("train.micro_batch_tokens=4096"), LAYOUT, WORK) == 4096
    assert num_micro_batches(config("train.micro_batch_tokens=4096"), LAYOUT, WORK) == 3
    one = config("train.micro_batch_tokens=65536")
    assert micro_batch_tokens(one, LAYOUT, WORK) == 12 * 1024 == largest_share(one, LAYOUT, WORK)
    assert num_micro_batches(one, LAYOUT, WORK) == 1
    assert largest_share(config("train.minibatches=3"), LAYOUT, WORK) == 4 * 1024
    # A sequence may be longer than the mean: it stands alone.
    assert largest_share(config("train.minibatches=6"), Layout(8), WORK) == 2 * 1024
