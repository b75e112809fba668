"""Training with an SGLang server on the trainer's own devices."""

import pytest

from tests.integration.sglang_tools import (
    Process,
    events,
    needs_sglang,
    rows,
    train,
    training_command,
)

pytestmark = [needs_sglang, pytest.mark.cluster]


@pytest.mark.parametrize("lora", [(), ("student.lora.rank=4",)], ids=["weights", "factors"])
def test_a_colocated_server_and_the_trainer_hand_the_gpu_over(tmp_path, lora):
    """On a CPU a server releases no memory: this shows the order of the requests, and that the
    server then has the right weights. Tokens whose probability differs too much are dropped. A run
    that keeps everything in place, on the same rollouts, has the same losses."""
    settings = (
        *lora,
        "train.steps=3",
        "train.precision=bf16",
        "kl.beta=0.1",
        "rollout.importance_correction=masked",
        "rollout.importance_threshold=1.0005",
    )
    colocated = ("rollout.sglang.placement=colocated", "rollout.sglang.sync=tensor")
    moves = train(tmp_path, "moves", *settings, *colocated)
    for row in rows(moves):
        assert 1e-4 < row["logprob/rollout_gap_max"] < 0.05
        assert 0 < row["importance/cut_share"] < 1
        assert row["memory/left_gib"] == 0
    log = (moves / "sglang/server_0.log").read_text()
    routes = ("release_memory_occupation", "resume_memory_occupation", "update_weights_from_tensor")
    routes += ("load_lora_adapter_from_tensors",)
    lines = [line for line in log.splitlines() if "200 OK" in line]
    asked = [route for line in lines for route in routes if f"/{route} " in line]
    release, resume, update, load = routes
    first, again = ([update, load], [load]) if lora else ([update], [update])
    assert asked == [*first, *[release, resume, *again] * 2, release]
    assert [event["event"] for event in events(moves)] == ["published"] * 3

    replaying = ("rollout.engine=replay", f"rollout.replay_from={moves}")
    stays = train(tmp_path, "stays", *settings, *replaying)
    for ours, theirs in zip(rows(moves), rows(stays), strict=True):
        for name in ("loss/total", "grad_norm", "tokens/trained"):
            assert ours[name] == theirs[name], name


def test_each_tensor_rank_of_a_colocated_server_reads_the_rank_on_its_gpu(tmp_path):
    """The server also samples evaluations, and does not inherit the variables of torchrun."""
    command = training_command(
        tmp_path,
        "cut",
        "train.steps=2",
        "parallel.tensor=2",
        "rollout.sglang.placement=colocated",
        "rollout.sglang.tensor=2",
        "evaluation.every=2",
        "evaluation.max_new_tokens=8",
    )
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    with Process([*command[:2], *torchrun, *command[2:]], tmp_path / "output") as process:
        assert process.wait() == 0, process.text[-3000:]
    run = tmp_path / "cut"
    assert max(row["logprob/rollout_gap_max"] for row in rows(run)) < 1e-4
    assert "eval/accuracy" in rows(run)[-1]
    log = (run / "sglang/server_0.log").read_text()
    assert "POST /update_weights_from_tensor" in log
    assert "update_weights_from_distributed" not in log
