"""Settings of the rollouts that exclude each other, and what follows from others."""

import pytest

from stable_opd_mcore.errors import ConfigError
from tests.config.cases import run_of

STALE = "rollout.max_staleness=1"
SGLANG = "rollout.engine=sglang"
COLOCATED = f"{SGLANG} rollout.sglang.placement=colocated"
EXTERNAL = f"{SGLANG} rollout.sglang.placement=external"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (f"rollout.engine=replay rollout.replay_from=a {STALE}", "not sampled ahead; set max_stal"),
        ("rollout.partial=true", "set max_staleness to at least 1"),
        ("rollout.max_staleness=9", "max_staleness: Input should be less than or equal to 8"),
        (f"{COLOCATED} {STALE}", "servers that sample ahead need devices of their own"),
        ("rollout.routing_replay=true", "engine=embedded: only sglang servers send the experts"),
        (
            f"{SGLANG} {STALE} rollout.routing_replay=true rollout.partial=true",
            "routing_replay=true with rollout.partial=true: .* set one of them to false",
        ),
        ("rollout.engine=replay", "replay needs the directory of a run"),
        ("rollout.replay_from=runs/other", "replay needs the directory of a run"),
        ("rollout.importance_threshold=1", "importance_threshold: Input should be greater"),
        ("sampling.horizon_start=8", "horizon_steps=None: a growing horizon needs both"),
        ("sampling.horizon_steps=8", "horizon_start=None with sampling.horizon_steps=8"),
        (
            "sampling.max_new_tokens=8 sampling.horizon_start=8 sampling.horizon_steps=2",
            "horizon_start=8 is not below sampling.max_new_tokens=8",
        ),
        (EXTERNAL, r"external with sglang.urls=\[\]: external servers, and only"),
        (f"{SGLANG} rollout.sglang.urls=[http://a:1]", "disaggregated with sglang.urls="),
        (
            f"{EXTERNAL} rollout.sglang.urls=[http://a:1] rollout.sglang.sync=tensor",
            "servers that this run starts itself; set sglang.sync=null",
        ),
        (
            f"{COLOCATED} rollout.sglang.sync=distributed",
            "cannot hold one GPU twice, as trainer and as server; set sglang.sync=null",
        ),
        ("rollout.sglang.port=65536", "sglang.port: Input should be less than or equal to 65535"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_of(settings)
