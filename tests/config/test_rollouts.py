"""Settings of the rollouts that exclude each other, and what follows from others."""

import pytest

from stable_opd_mcore.config.rollouts import SglangConfig
from stable_opd_mcore.errors import ConfigError
from tests.config.cases import run_with

OFF_BY_ONE = {"async_steps": 1, "max_staleness": 1}


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (OFF_BY_ONE, "needs rollout.engine=sglang: other engines share the trainer's ranks"),
        ({"engine": "sglang", "async_steps": 1}, "set rollout.max_staleness=1"),
        (
            OFF_BY_ONE | {"engine": "sglang", "sglang": {"placement": "colocated"}},
            "servers with devices of their own",
        ),
        (
            {"routing_replay": True},
            r"rollout.engine=embedded: only sglang servers send the experts",
        ),
        (
            OFF_BY_ONE | {"engine": "sglang", "routing_replay": True},
            r"rollouts in flight are saved without their experts",
        ),
        ({"engine": "replay"}, r"rollout.replay_from=RUN go together"),
        ({"replay_from": "runs/other"}, r"rollout.replay_from=RUN go together"),
        ({"importance_threshold": 1}, "rollout.importance_threshold: Input should be greater"),
    ],
)
def test_conflicting_settings_are_refused_with_the_remedy(rollout, message):
    with pytest.raises(ConfigError, match=message):
        run_with(rollout=rollout)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"horizon_start": 8}, "horizon_start and sampling.horizon_steps go together"),
        ({"horizon_steps": 8}, "horizon_start and sampling.horizon_steps go together"),
        (
            {"max_new_tokens": 8, "horizon_start": 8, "horizon_steps": 2},
            "horizon_start=8 is not below sampling.max_new_tokens=8",
        ),
    ],
)
def test_a_horizon_that_does_not_grow_is_refused(sampling, message):
    with pytest.raises(ConfigError, match=message):
        run_with(sampling=sampling)


@pytest.mark.parametrize(
    ("sglang", "message"),
    [
        ({"placement": "external"}, "external and sglang.urls"),
        ({"urls": ["http://a:1"]}, "external and sglang.urls"),
        (
            {"placement": "external", "urls": ["http://a:1"], "sync": "tensor"},
            "servers this run starts itself",
        ),
        (
            {"placement": "colocated", "sync": "distributed"},
            "cannot hold one GPU twice, as trainer and as server; set sglang.sync=null",
        ),
        (
            {"placement": "colocated", "first_gpu": 4},
            "sglang.first_gpu=4 with sglang.placement=colocated: .* set it to null",
        ),
        ({"port": 65536}, "rollout.sglang.port: Input should be less than or equal to 65535"),
    ],
)
def test_servers_that_cannot_serve_are_refused(sglang, message):
    with pytest.raises(ConfigError, match=message):
        run_with(rollout={"engine": "sglang", "sglang": sglang})


def test_the_transport_follows_from_the_placement_unless_it_is_set():
    def transport(**settings):
        return SglangConfig.model_validate(settings).transport

    assert transport(placement="colocated") == "tensor"
    assert transport(placement="disaggregated") == "distributed"
    assert transport(placement="external", urls=["http://a:1"]) == "distributed"
    assert transport(placement="colocated", sync="disk") == "disk"


def test_rollouts_one_step_old_need_servers_and_a_staleness_of_one():
    config = run_with(rollout=OFF_BY_ONE | {"engine": "sglang"})
    assert (config.rollout.async_steps, config.rollout.max_staleness) == (1, 1)
