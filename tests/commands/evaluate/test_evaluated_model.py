"""What a target means: its settings, its weights, and one clear line where it is none."""

import json

import pytest

from stable_opd_mcore.commands.evaluate.evaluated_model import (
    evaluated_config,
    evaluation_config,
    evaluation_configs,
    find_model,
    named_benchmarks,
)
from stable_opd_mcore.config.load import load_config, save_config
from stable_opd_mcore.errors import ConfigError, UserError
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS
from stable_opd_mcore.train.persistence.stored_models import StoredModel, mark_trained
from tests.parallel.launch import run_ranks
from tests.train.runs import tiny_architecture, tiny_config


@pytest.fixture
def run(tmp_path):
    """A run's directory with the files that say what it is."""
    path = tmp_path / "run"
    for name in ("model", "checkpoints/step_000004", "cold_start/model"):
        (path / name).mkdir(parents=True)
        (path / name / "config.json").write_text("{}")
    save_config(tiny_config(tmp_path, "run"), path / "config.resolved.yaml")
    save_config(tiny_config(path, "cold_start"), path / "cold_start" / "config.resolved.yaml")
    return path


@pytest.mark.parametrize("part", ["", "model", "checkpoints/step_000004"])
def test_a_run_its_model_and_its_checkpoint_have_the_settings_of_the_run(run, part):
    config = evaluation_config(run / part, overrides=["sampling.max_new_tokens=9"])
    stored = load_config(run / "config.resolved.yaml", ["sampling.max_new_tokens=9"])
    assert config.evaluation.model == str(run / part)
    assert config.evaluation_path == run / "evaluation"
    assert config.model_copy(update={"evaluation": stored.evaluation}) == stored


def test_a_window_given_to_the_evaluation_of_a_run_is_its_models(run):
    for part in ("model", "checkpoints/step_000004"):
        longer = evaluation_config(run, overrides=["student.window=99"])
        assert evaluated_config(longer, StoredModel(run / part, "step")).student.window == 99
    of_other = longer.replaced(run={"name": "other"})
    assert evaluated_config(of_other, StoredModel(run / part, "step")).student.window is None


@pytest.mark.parametrize(
    "override",
    [
        "student.path=x",
        "kl.beta=0.5",
        "++optimizer.lr=1",
        "data.train.path=x",
        "sampling.top_p=0.5",
    ],
)
def test_an_override_that_only_the_training_reads_is_refused(run, override):
    others = ["train.seed=3", "evaluation.top_p=0.5", "parallel.tensor=2"]
    for target in (run, run / "model"):
        with pytest.raises(
            UserError, match=r"has no effect on the evaluation of .*; drop it"
        ) as found:
            evaluation_config(target, overrides=[others[0], override, *others[1:]])
        assert repr(override) in str(found.value)
        assert evaluation_config(target, overrides=others).train.seed == 3
    assert evaluation_config(run / "config.resolved.yaml", overrides=["kl.beta=0.5"]).kl.beta == 0.5


def test_the_model_of_a_cold_start_is_of_the_cold_start(run):
    assert evaluation_config(run / "cold_start" / "model").run.name == "cold_start"


def test_a_model_of_no_run_has_the_papers_settings_or_those_given(tmp_path, run):
    model = tmp_path / "other"
    model.mkdir()
    (model / "config.json").write_text("{}")
    paper = evaluation_config(model)
    assert (paper.evaluation.temperature, paper.sampling.max_new_tokens) == (0.6, 8192)
    assert len(paper.evaluation.benchmarks) == 6
    assert paper.student.path == str(model)
    assert evaluation_config(model, overrides=["data.eval.path=x"]).evaluation.benchmarks == ()
    named = ["data.eval.path=x", "evaluation.benchmarks=[amc]"]
    assert evaluation_config(model, overrides=named).evaluation.benchmarks == ("amc",)
    given = evaluation_config(model, run / "config.resolved.yaml")
    assert (given.sampling.max_new_tokens, given.student.path) == (24, str(model))
    longer = evaluation_config(model, overrides=["student.window=99"])
    of_model = StoredModel(model, "other")
    assert evaluated_config(longer, of_model).student.window == 99
    another = longer.model_copy(update={"student": longer.student.model_copy(update={"path": "x"})})
    assert evaluated_config(another, of_model).student.window is None
    (model / "tokenizer.json").write_text("{}")
    own = evaluated_config(paper, of_model)
    assert own.tokenizer.path == str(model)
    assert own.run.path == paper.evaluation_path / "other"


def test_two_models_of_one_name_are_refused_before_the_first_is_evaluated(tmp_path, run):
    for name in ("a/model", "b/model", "c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    first, second = tmp_path / "a/model", tmp_path / "b/model"
    for allowed in ([first, first, tmp_path / "c"], [first, run, run / "model"]):
        evaluation_configs(allowed)
    with pytest.raises(UserError, match=r"a/model and .*b/model: the results of both would be in"):
        evaluation_configs([first, second])


def rendering(directory, name, **template_kwargs):
    """The config of a run whose student's chat template has these arguments."""
    student = {"architecture": tiny_architecture(32, 4), "chat_template_kwargs": template_kwargs}
    return tiny_config(directory, name, student=student)


def test_a_config_may_set_the_chat_templates_arguments_of_another_runs_model(tmp_path, run):
    save_config(rendering(tmp_path, "run", thinks=False), run / "config.resolved.yaml")
    trained, of_no_run = StoredModel(run / "model", "step"), StoredModel(tmp_path, "other")
    silent, chosen = tiny_config(tmp_path, "x"), rendering(tmp_path, "x", thinks=True)
    for config, model, expected in (
        (silent, trained, {"thinks": False}),
        (chosen, trained, {"thinks": True}),
        (silent, of_no_run, {}),
        (chosen, of_no_run, {"thinks": True}),
    ):
        assert evaluated_config(config, model).student.chat_template_kwargs == expected


def test_targets_that_are_none_end_with_one_line(tmp_path, run):
    with pytest.raises(
        UserError, match=r"neither a run .* nor a model .* nor an adapter .*; give one"
    ):
        evaluation_config(tmp_path)
    file = run / "config.resolved.yaml"
    with pytest.raises(UserError, match=r"is a config already; leave out --config"):
        evaluation_config(file, file)
    with pytest.raises(ConfigError, match=r"evaluation\.modal"):
        evaluation_config(run, overrides=["evaluation.modal=x"])


def test_names_of_benchmarks_become_a_setting(run):
    file = run / "config.resolved.yaml"
    for names, count in (("amc, aime24", 2), ("all", 6)):
        chosen = load_config(file, named_benchmarks(names)).evaluation.benchmarks
        assert (len(chosen), set(chosen) <= set(BENCHMARKS)) == (count, True)


def find_models(rank, world_size, home):
    def found(**evaluation):
        return find_model(tiny_config(home, "run", evaluation=evaluation))

    run = home / "run"
    with pytest.raises(UserError, match="no trained model in it: train first"):
        found()
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    save_config(tiny_config(home, "run"), run / "config.resolved.yaml")
    assert found() == StoredModel(run / "model", "model", "run", None)
    mark_trained(run / "model", "run", 8)
    assert found() == StoredModel(run / "model", "step_000008", "run", 8)
    assert found(model=str(run)) == found(model=str(run / "model")) == found()
    (run / "model").rename(home / "copied model")
    assert found(model=str(home / "copied model")).name == "copied_model"
    assert found(model=str(home / "copied model")).step == 8
    with pytest.raises(UserError, match=r"no such directory; set evaluation\.model to"):
        found(model=str(run / "model"))
    (home / "copied model" / "trained.json").write_text(json.dumps([8]))
    with pytest.raises(UserError, match=r"trained\.json: not what a run writes"):
        found(model=str(home / "copied model"))
    mark_trained(home / "copied model", "run", 8)
    assert found(model=str(home / "copied model")).step == 8


def test_the_trained_model_of_a_run_and_what_it_says_of_itself(tmp_path):
    run_ranks(1, find_models, tmp_path)
