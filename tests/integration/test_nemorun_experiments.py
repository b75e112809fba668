"""NeMo-Run experiments, launched as a user does, on a real Slurm and on this machine.

NeMo-Run stands in an environment of its own (extra `launch`): .venv-launch, or the interpreter that
STABLE_OPD_NEMORUN_PYTHON names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]
SETTINGS = {
    "VENV": str(Path(sys.executable).parents[1]),
    "RANKS": "1",
    "RANKS_PER_NODE": "1",
    "REQUIRE_GPU": "0",
    "PREFLIGHT": "off",
    "OMP_NUM_THREADS": "1",
}
TINY = (
    "train.steps=2 rollout.prompts_per_step=4 sampling.max_new_tokens=8 evaluation.every=0"
    " monitoring.tensorboard=false data.eval.limit=4"
)
ON_SLURM = ["run.executor=slurm", "run.executor.account=test", "run.executor.time=00:20:00"]


@pytest.fixture(scope="session")
def nemorun_python() -> str:
    own = REPOSITORY / ".venv-launch" / "bin" / "python"
    python = os.environ.get("STABLE_OPD_NEMORUN_PYTHON", str(own))
    if not Path(python).exists():
        reason = f"no NeMo-Run at {python}: `make launch` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return python


def launch(
    python: str, script: str, *arguments: str, env: dict[str, str], directory: Path
) -> subprocess.CompletedProcess[str]:
    """Run launch/<script>.py; its output goes to a file, for background tasks may outlive it."""
    output = directory / f"{script}.txt"
    with output.open("w") as file:
        answer = subprocess.run(
            [python, f"launch/{script}.py", "--yes", *arguments, f"directory={directory}"],
            cwd=REPOSITORY,
            env=env | SETTINGS | {"NEMORUN_HOME": str(directory / "nemo"), "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=300,
        )
    return subprocess.CompletedProcess(answer.args, answer.returncode, output.read_text())


def states(output: str) -> dict[str, str]:
    """What the launcher says of each stage in its last lines."""
    lines = [line.split(": ") for line in output.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2 and line[0].isidentifier()}


@pytest.mark.parametrize("where", ["slurm", "local"])
def test_a_failed_stage_cancels_the_rest_and_the_next_launch_completes(
    where, nemorun_python, request, tmp_path
):
    env = dict(os.environ)
    executor = ["run.executor=local"]
    if where == "slurm":
        env, executor = request.getfixturevalue("cluster").env, ON_SLURM
    stages = [
        *executor,
        "sft_config=configs/smoke_cpu.yaml",
        "opd_config=configs/smoke_cpu.yaml",
        f"common={TINY}",
        "sft=objective.name=sft kl.beta=0 mixture.lambda=0 rollout.samples_per_prompt=1",
    ]
    failed = launch(
        nemorun_python, "pipeline", *stages, "opd=train.stepz=3", env=env, directory=tmp_path
    )
    assert failed.returncode == 1, failed.stdout
    outcome = states(failed.stdout)
    assert outcome["sft"] == "SUCCEEDED", failed.stdout
    assert outcome["opd"] == "FAILED", failed.stdout
    assert outcome["evaluation"] in ("CANCELLED", "FAILED")
    assert not (tmp_path / "pipeline_opd").exists()
    assert not (tmp_path / "pipeline_evaluation").exists()

    mended = launch(nemorun_python, "pipeline", *stages, env=env, directory=tmp_path)
    assert mended.returncode == 0, mended.stdout
    assert set(states(mended.stdout).values()) == {"SUCCEEDED"}
    assert (tmp_path / "pipeline_opd" / "model" / "config.json").is_file()
    assert json.loads((tmp_path / "pipeline_evaluation" / "evaluation.json").read_text())


def test_a_sweep_gives_one_run_a_point_and_one_report(nemorun_python, cluster, tmp_path):
    done = launch(
        nemorun_python,
        "sweep",
        *ON_SLURM,
        "config=configs/smoke_cpu.yaml",
        "betas=0.01 0.1",
        "lambdas=0.1 1",
        f"opd={TINY}",
        env=cluster.env,
        directory=tmp_path,
    )
    assert done.returncode == 0, done.stdout
    runs = sorted(path.parent.name for path in tmp_path.glob("*/metrics.jsonl"))
    assert runs == [
        "sweep_beta0.01_lambda0.1",
        "sweep_beta0.01_lambda1",
        "sweep_beta0.1_lambda0.1",
        "sweep_beta0.1_lambda1",
    ]
    page = (tmp_path / "sweep.html").read_text()
    assert all(name in page for name in runs)


def test_a_dry_run_shows_our_script_inside_the_job(nemorun_python, tmp_path):
    shown = launch(
        nemorun_python,
        "pipeline",
        "--dryrun",
        *ON_SLURM,
        "size=1p5b",
        env=dict(os.environ),
        directory=tmp_path,
    )
    assert shown.returncode == 0, shown.stdout
    assert "slurm/stable_opd_1p5b.sh configs/stable_opd_1p5b.yaml" in shown.stdout
    assert "#SBATCH --signal=B:USR1@900" in shown.stdout
    assert "#SBATCH --kill-on-invalid-dep=yes" in shown.stdout
