"""Settings: every shipped file loads; every mistake is named with key, file and remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from stable_opd_mcore.config.load import load_config, save_config
from stable_opd_mcore.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
SMOKE = Path(__file__).parents[2] / "configs" / "smoke_cpu.yaml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_round_trips(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


def test_overrides_win_and_keep_types():
    config = load_config(SMOKE, ["train.steps=3", "mixture.lambda=0.5", "parallel.sequence=false"])
    assert config.train.steps == 3
    assert config.mixture.lambda_ == 0.5
    assert config.parallel.sequence is False


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", "unknown key train.step; did you mean train.steps?"),
        ("optimiser.lr=1", "unknown key optimiser; did you mean optimizer?"),
        ("xyz=1", "unknown key xyz; sections: run, student, teacher, "),
        ("rollout.prompts_per_stp=3", "did you mean rollout.prompts_per_step?"),
        ("train.steps=many", "train.steps: Input should be a valid integer"),
        ("sampling.temperature=0", "sampling.temperature: Input should be greater than 0"),
        ("optimizer.lr=.inf", "optimizer.lr: Input should be a finite number"),
        ("kl.beta=.nan", "kl.beta: Input should be a finite number"),
        ("parallel.sequence=true", "parallel.sequence=true needs parallel.tensor > 1"),
        ("parallel.expert=2", "parallel.expert=2 is not supported yet"),
        ("rollout.engine=replay", "rollout.replay_from=RUN go together"),
        ("student.path=somewhere", "give either path or architecture, not both"),
        ("train.steps", "expected key=value"),
    ],
)
def test_mistakes_name_the_key_the_file_and_the_remedy(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(SMOKE, [override])
    assert message in str(caught.value)
    if "=" in override:
        assert str(SMOKE) in str(caught.value)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("run: {name: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml: not readable as YAML"):
        load_config(broken)


def test_settings_load_without_torch():
    code = (
        "import sys; from stable_opd_mcore.config.load import load_config;"
        f"load_config({str(SMOKE)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
