"""Settings: every shipped file loads; an error names the key, the file and the remedy."""

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


def test_overrides_replace_values_and_have_their_types():
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
        ("student.path=somewhere", "give either path or architecture, not both"),
        ("train.steps", "expected key=value"),
        ("run.name=\x07", "an override is not readable as YAML"),
        ("run.name=" + "[" * 10_000, "an override is not readable as YAML"),
    ],
)
def test_errors_name_the_key_the_file_and_the_remedy(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(SMOKE, [override])
    assert message in str(caught.value)
    if "=" in override:
        assert str(SMOKE) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such config file"),
        (b"run: {name: [", "not readable as YAML"),
        (b"a: " + b"[" * 10_000, "not readable as YAML"),
        (b"- run\n- student\n", "a list at the top"),
        (b"\x7fELF\x02\xd0\xff", "not a text file"),
        (b"\0\0", "not readable as YAML"),
        (b"", "run is required"),
    ],
)
def test_files_that_are_not_settings_are_refused(tmp_path, content, message):
    path = tmp_path / "broken.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{path}: {message}"):
        load_config(path)


def test_directory_as_config_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_settings_load_without_torch():
    code = (
        "import sys; from stable_opd_mcore.config.load import load_config;"
        f"load_config({str(SMOKE)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
