"""The settings that differ between a stored run and a config, without those that may change."""

import pytest
import yaml

from stable_opd_mcore.commands.report.chosen_runs import read_settings as run_settings
from stable_opd_mcore.config.changes import FREE, changes, read_settings
from stable_opd_mcore.config.load import load_config, save_config
from stable_opd_mcore.config.schema import Config, Section
from tests.config.test_load import SMOKE


def differences(tmp_path, overrides):
    """Changes from smoke_cpu.yaml, stored, to smoke_cpu.yaml with overrides."""
    stored = tmp_path / "config.resolved.yaml"
    save_config(load_config(SMOKE), stored)
    return changes(read_settings(stored), load_config(SMOKE, overrides))


def test_a_stored_text_with_dollar_and_brace_is_the_one_that_was_set(tmp_path):
    texts = (
        "${x}",
        "a${oc.env:HOME",
        r"\${x}",
        r"\\${x}${y}" + "\\",
        r"\frac12 ${x^{2}}$",
        "$${\n",
    )
    stored = tmp_path / "config.resolved.yaml"
    for text in texts:
        config = load_config(SMOKE).replaced(
            monitoring={"mlflow": text},
            data={"prompt_template": f"{{problem}} {text}"},
            student={"chat_template_kwargs": {"a": {"b": [text]}}},
        )
        save_config(config, stored)
        assert load_config(stored) == config
        assert load_config(SMOKE, (), config.model_dump(mode="json", by_alias=True)) == config
        assert changes(read_settings(stored), config) == {}
        assert run_settings(tmp_path)["monitoring.mlflow"] == text
    save_config(load_config(SMOKE, [r"data.prompt_template=\${x}"]), stored)
    stored.write_text(stored.read_text().replace(r"\${x}", "${x}"))  # a run from before the escapes
    assert read_settings(stored)["data"]["prompt_template"] == "${x}"


@pytest.mark.parametrize("sources", [(), ["data.train=[{path: a, weight: 1}, {path: b}]"]])
def test_a_setting_that_a_stored_run_lacks_has_its_default(tmp_path, sources):
    config = load_config(SMOKE, sources)
    stored = config.model_dump(mode="json", by_alias=True)
    train = stored["data"]["train"]
    for source in train if sources else [train]:
        del source["columns"]["answer"], source["limit"]
    del stored["mixture"], stored["kl"]["beta"], stored["train"]["seed"], stored["objective"]
    path = tmp_path / "config.resolved.yaml"
    path.write_text(yaml.safe_dump(stored))
    found = {"kl.beta": (0.0, 0.1), "mixture.lambda": (0.0, 1.0)}
    assert changes(read_settings(path), config) == found
    other = load_config(SMOKE, ["data.train={path: a}", "train.seed=1"])
    assert changes(read_settings(path), other).keys() >= {*found, "train.seed"}


CHANGED = [
    ("optimizer.lr=0.002", {"optimizer.lr": (0.001, 0.002)}),
    ("kl.beta=0", {"kl.beta": (0.1, 0.0)}),
    ("objective.name=gkd", {"objective.name": ("opd", "gkd")}),
    ("train.seed=1", {"train.seed": (0, 1)}),
    ("data.train.limit=5", {"data.train.limit": (None, 5)}),
    ("student.architecture.hidden_size=128", None),
    ("cold_start={steps: 1, lr: 0.1}", None),
    ("train.steps=20", {}),
    ("parallel.tensor=2", {}),
    ("evaluation.every=0", {}),
    ("checkpoint.keep=9", {}),
    ("rollout.sglang.port=99", {}),
    ("run.name=other", {}),
]  # override, expected


def test_changed_settings_are_listed_unless_free(tmp_path):
    for override, expected in CHANGED:
        found = differences(tmp_path, [override])
        if expected is None:
            (key,) = found
            assert override.startswith(key)
        else:
            assert found == expected


def test_guard_is_listed_if_it_acts_or_has_acted(tmp_path):
    def found(before, after):
        stored = load_config(SMOKE, ["checkpoint.every=5", f"guard.policy={before}"])
        save_config(stored, tmp_path / "stored.yaml")
        new = load_config(SMOKE, ["checkpoint.every=5", f"guard.policy={after}"])
        return changes(read_settings(tmp_path / "stored.yaml"), new)

    assert found("warn", "off") == {}
    assert found("warn", "act") == {"guard.policy": ("warn", "act")}
    assert found("act", "off") == {"guard.policy": ("act", "off")}


def test_number_of_steps_is_listed_if_the_learning_rate_depends_on_it(tmp_path):
    stored = load_config(SMOKE, ["optimizer.schedule=cosine"])
    save_config(stored, tmp_path / "stored.yaml")
    longer = load_config(SMOKE, ["optimizer.schedule=cosine", "train.steps=20"])
    expected = {"train.steps": (10, 20)}
    assert changes(read_settings(tmp_path / "stored.yaml"), longer) == expected


def test_every_free_key_exists():
    for key in FREE:
        section: type[Section] = Config
        *parents, last = key.split(".")
        for name in parents:
            annotation = section.model_fields[name].annotation
            section = next(
                kind
                for kind in (annotation, *getattr(annotation, "__args__", ()))
                if isinstance(kind, type) and issubclass(kind, Section)
            )
        assert last in section.model_fields, key
