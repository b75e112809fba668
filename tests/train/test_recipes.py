"""Every shipped recipe: it says whose its values are, plans, and trains a tiny step."""

import re
from pathlib import Path
from typing import Any

import pytest

from stable_opd_mcore.commands.evaluate.table import published
from stable_opd_mcore.commands.plan.known_models import model_source
from stable_opd_mcore.commands.plan.plan import Cluster, make_plan
from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.load import load_config, parse_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.evaluation.benchmarks import BENCHMARKS
from tests.parallel.launch import run_ranks
from tests.train.runs import metrics_of

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))
BASELINES = sorted((CONFIGS / "baselines").glob("*.yaml"))
LINK = re.compile(r"\| .*\]\(([\w/]+\.yaml)\) \| (\S+) \| (\S+) \|")


def published_table() -> dict[str, tuple[str, str]]:
    """Config -> published average and GPU-hours, as configs/README.md has them."""
    lines = (CONFIGS / "README.md").read_text().splitlines()
    found = [match.groups() for line in lines if (match := LINK.fullmatch(line))]
    return {name: (average, hours) for name, average, hours in found}


def test_a_recipe_is_named_like_its_file_and_tells_the_papers_values_from_ours():
    for path in (*RECIPES, *BASELINES):
        text = path.read_text()
        assert "\n# Paper" in text, path
        assert "\n# Ours" in text, path
        assert load_config(path).run.name in (path.stem, "cold_start_1p5b")
        assert str(path.relative_to(CONFIGS)) in published_table()


def test_the_table_has_the_published_numbers_and_the_hours_of_the_plan():
    averages = {f"{row['average']:.1f}" for row in published()} | {
        "36.4",
        "40.7",
        "41.7",
        "41.5",
        "-",
    }
    for name, (average, hours) in published_table().items():
        assert average in averages, name
        if not name.startswith("baselines"):
            plan = make_plan(load_config(CONFIGS / name), Cluster(1, 8, 0), "h200")
            assert float(hours) == pytest.approx(plan.gpu_hours, rel=0.1, abs=0.6), name


def test_the_command_of_the_table_evaluates_each_row_on_the_six_benchmarks():
    readme = (CONFIGS / "README.md").read_text()
    endings = re.findall(r"\bevaluate(?:\.sh)? CONFIG([^`\n]*)", readme)
    settings = [line.split() for line in endings]
    assert settings == 2 * settings[:1]  # torchrun and Slurm
    for name in published_table():
        config = load_config(CONFIGS / name, settings[0])
        assert set(config.evaluation.benchmarks) == set(BENCHMARKS), name
        assert config.evaluation.benchmark_directory == "data", name
        assert config.is_colocated, name


def test_the_recipes_of_other_papers_have_their_values():
    lsm, mask = (load_config(CONFIGS / "recipes" / f"{n}.yaml") for n in ("lsm_7b", "lsm_mask_7b"))
    assert (lsm.objective.name, lsm.objective.top_k, lsm.aggregation) == ("lsm", 32, "token_mean")
    assert (lsm.sampling.top_p, lsm.sampling.temperature, lsm.kl.beta) == (0.9, 1.0, 0.0)
    assert mask.objective.masks.special_token_ids == (151643, 151645)
    agentic = load_config(CONFIGS / "recipes" / "lsm_agentic_7b.yaml")
    assert (agentic.objective, agentic.aggregation) == (lsm.objective, lsm.aggregation)
    assert [agentic.environment_of(each).longest for each in agentic.data.sources] == [1, 30]
    assert [agentic.budget_of(each) for each in agentic.data.sources] == [8192, 512]
    assert agentic.teacher.routes.keys() == {each.name for each in agentic.data.sources}
    top = load_config(CONFIGS / "recipes" / "rethinking_1p5b.yaml")
    cold = load_config(CONFIGS / "recipes" / "rethinking_cold_start_1p5b.yaml")
    assert (top.objective.name, top.objective.top_k) == ("student_topk", 16)
    assert top.aggregation == "token_mean"
    assert 3000 <= top.sampling.max_new_tokens <= 7168
    assert cold.optimizer.lr == 1e-5
    assert top.student.path == f"{cold.run.path}/model"
    assert top.data.prompt_template == cold.data.prompt_template
    assert top.data.prompt_template.startswith("{problem} Please reason step by step")


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_7b_pair_with_an_adapter_fits_two_gpus(gpu):
    config = load_config(CONFIGS / "recipes" / "stable_opd_7b_lora.yaml")
    assert make_plan(config, Cluster(1, 2, 0), gpu).memory.fits


def shrunk(model: Any) -> dict[str, Any]:
    """The settings of a tiny model of the same family."""
    source, _ = model_source(model, "model")
    assert isinstance(source, dict)
    if "text_config" in source:
        source = source["text_config"] | {"model_type": f"{source['model_type']}_text"}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    sizes |= {"max_position_embeddings": 128, "initializer_range": 0.1}
    sizes |= {"rope_theta": 10000.0, "tie_word_embeddings": False}  # equal for equal recipes
    if "linear_num_key_heads" in source:
        sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        sizes |= {"full_attention_interval": 2}
    if source["model_type"] == "gemma3_text":  # its head is tied
        kinds = ["sliding_attention", "full_attention"]
        sizes |= {"tie_word_embeddings": True, "layer_types": kinds}
    if "kv_lora_rank" in source:
        ranks = {"q_lora_rank": source["q_lora_rank"] and 8, "kv_lora_rank": 8}
        sizes |= ranks | {"num_key_value_heads": 4, "head_dim": None}
        sizes |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
        sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        sizes |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    if "num_local_experts" in source:
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {
        "architecture": {**source, **sizes, **({"head_dim": 8} if "head_dim" in source else {})}
    }


def tiny(config: Config, directory: Path) -> tuple[str, Config]:
    """The recipe with tiny models of its families; what is left of it, to run equal ones once."""
    values = config.model_dump(by_alias=True)
    values["student"] = shrunk(config.student) | {"lora": values["student"]["lora"]}
    if config.cold_start is not None:
        values["cold_start"] |= {"steps": 1, "prompts_per_step": 4}
    if config.teacher is not None and config.teacher.is_self:
        values["teacher"] = {"path": "self", "prompt": "{{ solution }}{{ problem }}"}
    elif config.teacher is not None:
        # A served one may be of a family that the trainer does not know.
        values["teacher"] = shrunk(config.student if config.teacher.is_served else config.teacher)
    of_models = ("parallel", "memory", "fault", "checkpoint", "reference")
    for unset in (*of_models, "evaluation", "environment"):
        values[unset] = {}
    values["tokenizer"] = {"path": "synthetic"}
    values["data"] = {"train": {"path": "synthetic:arithmetic", "options": {"rows": 16}}}
    values["normaliser"] = "global"  # of one source
    values["sampling"]["max_new_tokens"] = 8
    values["rollout"] = {"prompts_per_step": 4, "samples_per_prompt": 2, "save": "none"}
    values["objective"]["masks"]["special_token_ids"] = tuple(
        20 for _ in values["objective"]["masks"]["special_token_ids"][:1]
    )
    if config.objective.name in ("lsm", "student_topk"):
        values["objective"]["top_k"] //= 4  # the vocabulary has 24 symbols
    values["optimizer"] |= {"warmup_steps": min(1, config.optimizer.warmup_steps)}
    values["train"] |= {"steps": 1, "precision": "fp32", "micro_batch_tokens": 256}
    values["train"] |= {"recompute": "none"}
    values["evaluation"] = values["checkpoint"] = {"every": 0}
    values["monitoring"] = {"tensorboard": False}
    values["run"] = {"name": "x", "directory": str(directory)}
    same = repr({key: values[key] for key in values if key != "optimizer"})
    values["run"]["name"] = config.run.name
    return same, parse_config(values, config.run.name)


def train_all(rank: int, world_size: int, directory: Path) -> None:
    done: set[str] = set()
    for path in RECIPES:
        same, config = tiny(load_config(path), directory)
        if same not in done:
            done.add(same)
            train(config, show_progress=False)
            steps = [row["step"] for row in metrics_of(directory / config.run.name)]
            assert steps == [1], path
    assert 12 <= len(done) < len(RECIPES)


def test_every_recipe_trains_tiny_models(tmp_path):
    run_ranks(1, train_all, tmp_path)
