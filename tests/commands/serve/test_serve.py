"""What `stable-opd serve` refuses before it starts a server; tests/integration starts servers."""

from pathlib import Path

import pytest

from stable_opd_mcore.commands.serve.serve import serve
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.errors import ConfigError

CONFIG = Path(__file__).parents[3] / "configs/smoke_cpu.yaml"
EXTERNAL = ("rollout.sglang.placement=external", "rollout.sglang.urls=[http://host:1]")


@pytest.mark.parametrize(
    ("overrides", "teacher", "message"),
    [
        (EXTERNAL, False, r"external, but serve starts servers: set it to disaggregated"),
        ((), True, r"serve --teacher without teacher\.path"),  # its weights would be random
    ],
)
def test_refusals(overrides, teacher, message):
    with pytest.raises(ConfigError, match=message):
        serve(load_config(CONFIG, overrides), teacher=teacher, say=print)
