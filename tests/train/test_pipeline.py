"""Complete runs: the smoke config, a teacher equal to the student, two updates, GSM8K."""

import json
import math
import re
from pathlib import Path

import pytest

from stable_opd_mcore.commands.train.train import train
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import read_metrics
from stable_opd_mcore.monitoring.names import NAMES
from stable_opd_mcore.train.samples import overlap
from tests.command import exit_code
from tests.parallel.launch import run_ranks
from tests.real_data import real_data
from tests.train.runs import metrics_of, tiny_architecture, tiny_config

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs"


def on_one_rank(rank: int, world_size: int, directory: str) -> None:
    smoke(directory)
    one_and_two_updates(directory)
    own_teacher(directory)


def smoke(directory: str) -> None:
    overrides = [
        f"run.directory={directory}",
        "evaluation.also_greedy=true",
        "rollout.importance_correction=truncated",
    ]
    train(load_config(CONFIGS / "smoke_cpu.yaml", overrides), False)


def own_teacher(directory: str) -> None:
    """Teacher and student of the same random weights; an update of size zero keeps them equal."""
    overlap.EVERY = 2
    config = tiny_config(
        Path(directory),
        "own_teacher",
        teacher={"architecture": tiny_architecture(32, 2)},
        kl={"beta": 0.0},
        mixture={"lambda": 0.0},
        optimizer={"lr": 1e-30, "warmup_steps": 0},
        train={"steps": 2},
        sampling={"max_new_tokens": 100},
    )
    train(config, show_progress=False)


def one_and_two_updates(directory: str) -> None:
    """The same rollouts in one update and in two; the learning rate changes no weight."""
    zero_update = {"lr": 1e-30, "warmup_steps": 0}
    for number in (1, 2):
        train(
            tiny_config(
                Path(directory),
                f"in_{number}",
                optimizer=zero_update,
                train={"steps": 2, "minibatches": number},
            ),
            show_progress=False,
        )


def gsm8k(rank: int, world_size: int, directory: str, data: str) -> None:
    overrides = [
        f"run.directory={directory}",
        f"tokenizer.path={data}/tokenizers/Qwen2.5-Math-1.5B",
        f"data.train.path={data}/gsm8k/train.jsonl",
        f"data.eval.path={data}/gsm8k/test.jsonl",
        "data.train.limit=48",
        "sampling.max_new_tokens=8",
        "cold_start.steps=4",
        "cold_start.prompts_per_step=4",
        "rollout.prompts_per_step=2",
        "train.steps=1",
    ]
    train(load_config(CONFIGS / "gsm8k_cpu.yaml", overrides), show_progress=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    run_ranks(1, on_one_rank, str(directory))
    return directory


def test_smoke_config_writes_every_file_and_metric(runs, monkeypatch):
    run = runs / "smoke_cpu"
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(11))
    assert "eval/accuracy" in rows[0]
    written = {key for row in read_metrics(RunDirectory(run).metrics) for key in row}
    others = ("engine/", "moe/", "environment/")  # rollout servers, experts, environments
    others += ("perf/staleness_", "rollout/prefix_")  # rollouts that lag, that others begin
    others += ("teacher_prompt/",)  # prompts made of what happened
    of_episodes = re.compile("_turn_|/turns_|/episode_|/repeated_turn|/ending_")
    unwritten = {
        key
        for key in NAMES.keys() - written
        if not key.startswith(others) and not of_episodes.search(key)
    }
    of_servers = {"memory/left_gib", "time/wait"}
    of_servers |= {f"perf/{role}_waited" for role in ("trainer", "servers", "teacher")}
    ahead = {"perf/continued_share", "rollout/mixed_groups"}
    assert unwritten == of_servers | ahead
    assert rows[-1]["logprob/rollout_gap_max"] < 1e-4  # engine and trainer agree
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.resolved.yaml",
        "metrics.jsonl",
        "rollouts",
        "checkpoints",
        "summary.json",
        "report.html",
        "model",
        "tensorboard",
    }
    assert json.loads((run / "summary.json").read_text())["step"] == 10
    assert len(list((run / "rollouts").iterdir())) == 10
    assert load_config(run / "config.resolved.yaml").run.name == "smoke_cpu"

    assert exit_code(monkeypatch, "report", run, "--output", f"{run}/again.html") == 0
    assert "uPlot" in (run / "again.html").read_text()  # self-contained


def test_teacher_equal_to_the_student_gives_zero_loss_and_gradient(runs):
    first, second = metrics_of(runs / "own_teacher")
    for row in (first, second):
        assert row["loss/total"] == pytest.approx(0, abs=1e-6)
        assert row["grad_norm"] == pytest.approx(0, abs=1e-5)
        assert row["logprob/teacher"] == pytest.approx(row["logprob/student"], abs=1e-6)

    assert not any(key.startswith(("overlap/", "stop/")) for key in first)
    assert second["overlap/ratio"] == 1
    assert second["overlap/advantage"] == pytest.approx(0, abs=1e-6)
    assert second["overlap/student_mass"] == pytest.approx(second["overlap/teacher_mass"])
    assert second["stop/student_mass"] == pytest.approx(second["stop/teacher_mass"])
    # Every response, sampled at temperature 1, ends with the only stop id: the stop mass is the
    # probability of its last token.
    stored = (runs / "own_teacher" / "rollouts" / "step_000002.jsonl").read_text()
    rollouts = [json.loads(line) for line in stored.splitlines()]
    assert {rollout["finish_reason"] for rollout in rollouts} == {"stop"}
    stops = [math.exp(rollout["rollout_logprobs"][-1]) for rollout in rollouts]
    assert second["stop/student_mass"] == pytest.approx(sum(stops) / len(stops), rel=1e-4)


def test_step_of_two_updates_reports_the_mean_of_their_losses(runs):
    for one, two in zip(metrics_of(runs / "in_1"), metrics_of(runs / "in_2"), strict=True):
        for key in ("loss/total", "loss/pg", "loss/sft"):
            assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-7), key
        assert two["tokens/trained"] == one["tokens/trained"]


def test_gsm8k_config_trains_on_real_problems(tmp_path):
    data = real_data("gsm8k/train.jsonl").parents[1]
    run_ranks(1, gsm8k, str(tmp_path), str(data))
    cold = metrics_of(tmp_path / "gsm8k_cpu" / "cold_start")
    assert cold[-1]["loss/sft"] < cold[0]["loss/sft"] - 0.1
    (row,) = metrics_of(tmp_path / "gsm8k_cpu")
    assert row["loss/kl"] is not None
    assert row["loss/sft"] > 0
    stored = (tmp_path / "gsm8k_cpu" / "rollouts" / "step_000001.jsonl").read_text()
    assert len(stored.splitlines()) == 4  # 2 prompts, 2 samples each
    prompt = json.loads(stored.splitlines()[0])["prompt"]
    assert "reason step by step" not in prompt  # the prompt is the problem, without an instruction
