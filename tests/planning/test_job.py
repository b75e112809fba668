"""How many tokens a rank has in a step, a minibatch and a micro-batch."""

from stable_opd_mcore.planning.hardware import Cluster
from stable_opd_mcore.planning.job import Job, Work, make_job
from tests.planning.cases import NODE, config_7b


def test_a_micro_batch_is_no_larger_than_a_ranks_share(tmp_path):
    drawn = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "mixture.lambda=0")

    def job(*overrides: str, cluster: Cluster = NODE) -> Job:
        config = config_7b(tmp_path, *drawn, "sampling.max_new_tokens=1024", *overrides)
        return make_job(config, cluster, work=Work(prompt_tokens=256, response_tokens=768))

    assert job().sequences == 24
    mixed = job("mixture.lambda=0.5")
    assert (mixed.sequences, mixed.scored) == (24 + 6, 24)
    assert (mixed.micro_batch_tokens, mixed.num_micro_batches) == (12 * 1024, 2)
    gkd = ("objective.name=gkd", "objective.on_policy_fraction=0.5")
    assert job(*gkd).scored == job(*gkd).sequences == 24 + 6
    several = job("train.micro_batch_tokens=4096")
    assert (several.micro_batch_tokens, several.num_micro_batches) == (4096, 3)
    one = job("train.micro_batch_tokens=65536")
    assert one.micro_batch_tokens == 12 * 1024 == one.largest_share
    assert one.num_micro_batches == 1
    assert job("train.minibatches=3").largest_share == 4 * 1024
    # A sequence longer than the mean has a micro-batch of its own.
    eight = job("train.minibatches=6", "parallel.tensor=1", "parallel.sequence=false")
    assert eight.largest_share == 2 * 1024
