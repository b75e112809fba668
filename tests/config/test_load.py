"""Settings: every shipped file loads; an error names the key, the file and the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest

from stable_opd_mcore.config.changes import changes, read_settings
from stable_opd_mcore.config.load import load_config, save_config
from stable_opd_mcore.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
EXTERNAL = "rollout={engine: sglang, sglang: {placement: external, urls: ['http://n1:80']}}"
SERVED = "teacher={engine: sglang, path: null, architecture: null, urls: ['http://10.0.0.1:30000']}"
SMOKE = Path(__file__).parents[2] / "configs" / "smoke_cpu.yaml"


def test_every_shipped_config_loads_and_is_what_a_run_stores_of_it(tmp_path):
    stored = tmp_path / "resolved.yaml"
    for path in CONFIGS:
        config = load_config(path)
        save_config(config, stored)
        assert load_config(stored) == config, path
        assert changes(read_settings(stored), config) == {}, path


@pytest.mark.parametrize("text", ["End with #### and the answer.", "# x", "x #", "a: b # c"])
def test_no_override_is_cut_at_a_hash(text):
    config = load_config(SMOKE, [f"data.system_prompt={text}"])
    assert config.data.system_prompt == text
    with pytest.raises(ConfigError, match=r"train\.steps: Input should be a valid integer"):
        load_config(SMOKE, [f"train.steps=3 {text}"])


@pytest.mark.parametrize(
    ("override", "message", "remedy"),
    [
        ("train.step=3", "unknown key train.step; did you mean train.steps?", "train.steps=3"),
        ("optimiser.lr=1", "unknown key optimiser; did you mean optimizer?", "optimizer.lr=1"),
        ("xyz=1", "unknown key xyz; sections: run, student, teacher, ", ""),
        ("rollout.prompts_per_stp=3", "did you mean rollout.prompts_per_step?",
         "rollout.prompts_per_step=3"),
        ("rollout.temperature=1", "did you mean sampling.temperature or evaluation.temperature?",
         "sampling.temperature=1"),
        ("data.train.weight=2", "write data.train as a list, whose entries have it",
         "data.train=[{path: a, weight: 2}]"),
        ("guard.xyz.a=1", "unknown key guard.xyz; keys of guard: policy, max_beta, ",
         "guard.policy=off"),
        (f"train.steps={10**30}", "train.steps: 1e+30 is too large; set at most 1e+09",
         "train.steps=1000000000"),
        (f"train.seed={2**63}", "train.seed: 9.22337e+18 is too large", "train.seed=1"),
        ("rollout.samples_per_prompt=1000000", "Input should be less than or equal to 65536",
         "rollout.samples_per_prompt=65536"),
        ("fault.watchdog_minutes=1e300", "1e+300 is too large", "fault.watchdog_minutes=60"),
        ("train.steps=010", "010 is not a decimal number to YAML", "train.steps=10"),
        ("fault.watchdog_minutes=1:30", "1:30 is not a decimal number to YAML",
         "fault.watchdog_minutes=90"),
        ("optimizer.lr=yes", "optimizer.lr: True is true or false; expected a number",
         "optimizer.lr=1"),
        ("teacher.stop_token_ids=[no]", "[False] is true or false; expected a number",
         "teacher.stop_token_ids=[1]"),
        ("train.steps=many", "train.steps: Input should be a valid integer", "train.steps=3"),
        ("sampling.temperature=0", "sampling.temperature: Input should be greater than 0",
         "sampling.temperature=0.1"),
        ("optimizer.lr=.inf", "optimizer.lr: Input should be a finite number", "optimizer.lr=1"),
        ("kl.beta=.nan", "kl.beta: Input should be a finite number", "kl.beta=1"),
        ("student.path=somewhere", "path and architecture are both set; drop one",
         "student.path=somewhere + student.architecture=null"),
        ("train.steps", "has no =: write key=value", "train.steps=10"),
        ("teacher.urls=[10.0.0.1:30000]", "expected http://HOST:PORT", SERVED),
        ("rollout.sglang.urls=['http://']", "'http://' is not a server's address", EXTERNAL),
        ("rollout.sglang.urls=['http://n1:99999']", "'http://n1:99999' is not a server's address",
         EXTERNAL),
        ("rollout.sglang.urls=['http://n..1:80']", "'http://n..1:80' is not a server's address",
         EXTERNAL),
        ("rollout.sglang.urls=['http://n1:0']", "'http://n1:0' is not a server's address",
         EXTERNAL),
        ("teacher.urls=['http://me:word@n1:80']", "is not a server's address", SERVED),
        ("teacher.urls=['http://n1:80?key=a']", "is not a server's address", SERVED),
        ("teacher.urls=['http://n1:80/v1/']", "is OpenAI's interface of a server; leave out /v1",
         SERVED),
        ("rollout.sglang.urls=['http://n1:80','http://n1:80/']",
         "names a server twice; give each once", EXTERNAL),
        ("run.directory=~/runs", "run.directory: ~/runs: only a shell replaces ~",
         "run.directory=/root/runs"),
        ("run.name=\x07", "not YAML; correct it", "run.name=a"),
        ("run.name=" + "[" * 1_000, "not YAML; correct it", "run.name=a"),
        ("teacher.prompt={{ problem }}", "put a text in quotes, which YAML must see",
         'teacher.prompt="{{ problem }}"'),
        ("data.prompt_template=Q: {problem}", "put the text in quotes, which YAML must see",
         'data.prompt_template="Q: {problem}"'),
    ],
)  # fmt: skip
def test_errors_name_the_key_the_file_and_the_remedy(override, message, remedy):
    with pytest.raises(ConfigError) as caught:
        load_config(SMOKE, [override])
    load_config(SMOKE, remedy.split(" + ") if remedy else [])
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"override {override!r:.200}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.steps=3", "train.steps=4"],
        ["train.steps=3", "train.steps=3"],
        ["train.steps=3", "train={steps: 4}"],
        ["teacher.stop_token_ids=[1]", "teacher=null"],
        ["data.train=[{path: a}, {path: b}]", "data.train.path=c"],
    ],
)
def test_two_overrides_of_one_setting_are_refused_unless_the_later_replaces(overrides):
    first, second = overrides
    with pytest.raises(ConfigError) as found:
        load_config(SMOKE, [first, "kl.beta=0.1", second])
    assert f"'{first}' and override '{second}': two values of one setting" in str(found.value)
    remedy = f"++{second}"
    assert f"write {remedy} to replace the first" in str(found.value)
    replaced = load_config(SMOKE, [first, "kl.beta=0.1", remedy])
    if first.partition("=")[0] in ("train.steps", "teacher.stop_token_ids"):
        assert replaced == load_config(SMOKE, ["kl.beta=0.1", second])
    with pytest.raises(ConfigError, match="two values of one setting"):
        load_config(SMOKE, [remedy, "kl.beta=0.1", second])


def test_overrides_of_different_settings_are_no_two_values():
    config = load_config(SMOKE, ["train={steps: 3}", "train.seed=1", "++kl.beta=0.1"])
    assert (config.train.steps, config.train.seed, config.kl.beta) == (3, 1, 0.1)


def test_no_value_is_ignored(tmp_path):
    """In OmegaConf an empty section and ??? change nothing."""
    assert load_config(SMOKE, ["data.train.options={}"]).data.sources[0].options == {}
    (tmp_path / "own.yaml").write_text(f"base: {SMOKE}\ndata: {{train: {{options: {{}}}}}}\n")
    assert load_config(tmp_path / "own.yaml").data.sources[0].options == {}
    with pytest.raises(ConfigError, match=r"run\.name: \?\?\? is no value"):
        load_config(SMOKE, ["run.name=???"])


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
    path.write_text(SMOKE.read_text())
    load_config(path)


def test_directory_as_config_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_settings_load_and_plans_are_made_without_torch():
    """Importing torch takes seconds, and a batch script plans before every attempt."""
    code = (
        "import sys; from stable_opd_mcore.config.load import load_config;"
        "from stable_opd_mcore.commands.plan.plan import Cluster, make_plan;"
        f"make_plan(load_config({str(SMOKE)!r}), Cluster(1, 2, 0), 'h200');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_base_gives_what_the_file_does_not_say(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "mid.yaml").write_text(f"base: {SMOKE}\ntrain: {{steps: 7, seed: 5}}\n")
    (tmp_path / "own.yaml").write_text("base: part/mid.yaml\ntrain: {steps: 3}\nteacher: null\n")
    config = load_config(tmp_path / "own.yaml", ["rollout.prompts_per_step=2"])
    smoke = load_config(SMOKE)
    assert (config.train.steps, config.train.seed) == (3, 5)
    assert (config.teacher, config.rollout.prompts_per_step) == (None, 2)
    assert (config.student, config.optimizer) == (smoke.student, smoke.optimizer)
    save_config(config, tmp_path / "resolved.yaml")
    assert "base:" not in (tmp_path / "resolved.yaml").read_text()
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "base: b.yaml", "b": "base: a.yaml"}, r"form a circle: .*a\.yaml -> .*b\.yaml"),
        ({"a": "base: a.yaml"}, "its bases form a circle"),
        ({"a": "base: none.yaml"}, r"none\.yaml: no such config file"),
        ({"a": "base: [x.yaml]"}, r"base=\['x\.yaml'\]; set it to the path of one YAML file"),
        ({"a": "base: b.yaml", "b": "trains: {}"}, r"a\.yaml: unknown key trains; did you mean"),
    ],
)
def test_bases_that_cannot_be_used_are_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text(f"base: {SMOKE}")
    load_config(tmp_path / "a.yaml")
