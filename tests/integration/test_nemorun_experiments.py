"""NeMo-Run experiments, launched with the user's commands, on Slurm and on this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]
SETTINGS = {
    "VENV": str(Path(sys.executable).parents[1]),
    "RANKS": "1",
    "RANKS_PER_NODE": "1",
    "REQUIRE_GPU": "0",
    "PREFLIGHT": "off",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}
TINY = (
    "train.steps=2 rollout.prompts_per_step=4 sampling.max_new_tokens=8 evaluation.every=0"
    " monitoring.tensorboard=false data.eval.limit=4"
)
PIPELINE = [
    "sft_config=configs/smoke_cpu.yaml",
    "opd_config=configs/smoke_cpu.yaml",
    f"common={TINY}",
    "sft=objective.name=sft kl.beta=0 mixture.lambda=0 rollout.samples_per_prompt=1",
]
ON_SLURM = ["run.executor=slurm", "run.executor.time=00:20:00"]
LOCALLY = ["run.executor=local"]
BROKEN = "opd=train.stepz=3"


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


class Launcher:
    """Runs launch/*.py and NeMo-Run's own command in one directory."""

    def __init__(self, python: str, directory: Path):
        self.python, self.directory = python, directory
        # unique: logs are named by the job number, which repeats between clusters
        self.name = f"test_{uuid.uuid4().hex[:8]}"
        self.env = os.environ | SETTINGS | {"NEMORUN_HOME": str(directory / "nemo")}

    def launch(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        location = (f"name={self.name}", f"directory={self.directory}")
        return self._call(f"launch/{script}.py", "--yes", *arguments, *location)

    def nemo(self, *arguments: str) -> str:
        result = self._call(str(Path(self.python).parent / "nemo"), "experiment", *arguments)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def run(self, point: str) -> Path:
        return self.directory / f"{self.name}_{point}"

    def _call(self, *command: str) -> subprocess.CompletedProcess[str]:
        # A file and not a pipe: background tasks may run longer than the command.
        with (self.directory / "output.txt").open("w+") as file:
            result = subprocess.run(
                [self.python, *command],
                cwd=REPOSITORY,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=900,  # NeMo-Run looks for the end of a job once a minute
            )
            file.seek(0)
            return subprocess.CompletedProcess(command, result.returncode, file.read())


@pytest.fixture
def launcher(nemorun_python, tmp_path):
    launcher = Launcher(nemorun_python, tmp_path)
    yield launcher
    for logs in (REPOSITORY / "runs" / "slurm").glob(f"{launcher.name}.*"):
        shutil.rmtree(logs)


def states(launched: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The state of each stage, from the launcher's last lines."""
    lines = [line.split(": ") for line in launched.stdout.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2 and line[0].isidentifier()}


def check_failed(launcher: Launcher, launched: subprocess.CompletedProcess[str]) -> None:
    assert launched.returncode == 1, launched.stdout
    expected = {"sft": "SUCCEEDED", "opd": "FAILED", "evaluation": "CANCELLED"}
    assert states(launched) == expected, launched.stdout
    assert not launcher.run("opd").exists()
    assert not launcher.run("evaluation").exists()


def check_completed(launcher: Launcher, launched: subprocess.CompletedProcess[str]) -> None:
    assert launched.returncode == 0, launched.stdout
    expected = dict.fromkeys(("sft", "opd", "evaluation"), "SUCCEEDED")
    assert states(launched) == expected, launched.stdout
    steps = (launcher.run("opd") / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2]
    assert (launcher.run("opd") / "model" / "config.json").is_file()
    results = launcher.run("evaluation") / "evaluation" / "step_000002" / "results.json"
    assert json.loads(results.read_text())["benchmarks"]["held_out"]


def preempt(cluster, launcher: Launcher, stage: str) -> str:
    """Send SIGUSR1 to a stage's job once its script has set its traps; return the job's id."""
    name = f"{launcher.name}.{stage}"

    def job() -> str:
        return cluster.call("squeue", "--noheader", f"--name={name}", "--format=%i").strip()

    def has_traps() -> bool:
        logs = launcher.directory.glob(f"nemo/**/log-{name}_{job()}_0.out")
        return any("[attempt 0] trainers" in log.read_text() for log in logs)

    cluster.until(has_traps, 200, f"job {name} runs")
    preempted = job()
    cluster.call("scancel", "--batch", "--signal=USR1", preempted)
    return preempted


def test_slurm_failed_stage_cancels_the_rest_and_preempted_stage_resumes(launcher, cluster):
    launcher.env |= cluster.env
    check_failed(launcher, launcher.launch("pipeline", *ON_SLURM, *PIPELINE, BROKEN))

    with ThreadPoolExecutor() as pool:
        launched = pool.submit(launcher.launch, "pipeline", *ON_SLURM, *PIPELINE)
        job = preempt(cluster, launcher, "opd")
        resumed = launched.result()
    check_completed(launcher, resumed)
    assert cluster.field(job, "Restarts") == "1"

    experiment = re.findall(rf"{launcher.name}_\d{{10,}}", resumed.stdout)[-1]
    assert launcher.nemo("status", experiment).count("SUCCEEDED") == 3
    assert "verdict: done" in launcher.nemo("logs", experiment, "1")


def test_local_failed_stage_cancels_the_rest(launcher):
    check_failed(launcher, launcher.launch("pipeline", *LOCALLY, *PIPELINE, BROKEN))


def test_sweep_makes_one_run_per_point_and_seed_and_one_report(launcher, cluster):
    launcher.env |= cluster.env
    grid = "grid=objective.stop_class=true,false kl.beta+mixture.lambda=0.01+0.1"
    arguments = ("config=configs/smoke_cpu.yaml", grid, "seeds=1 2", f"opd={TINY}")
    done = launcher.launch("sweep", *ON_SLURM, *arguments)
    assert done.returncode == 0, done.stdout
    points = [
        launcher.run(f"stop_class_{stops}_beta0.01_lambda0.1_seed{seed}")
        for stops in ("false", "true")
        for seed in (1, 2)
    ]
    runs = launcher.directory.glob("*/metrics.jsonl")
    assert sorted(path.parent for path in runs) == sorted(points)
    resolved = yaml.safe_load((points[1] / "config.resolved.yaml").read_text())
    assert not resolved["objective"]["stop_class"]
    assert resolved["train"]["seed"] == 2
    assert resolved["kl"]["beta"] == 0.01
    page = (launcher.directory / f"{launcher.name}.html").read_text()
    assert all(point.name in page for point in points)


def test_dry_run_prints_the_batch_script_of_each_job(launcher):
    shown = launcher.launch("pipeline", "--dryrun", *ON_SLURM, "size=1p5b", "run.executor.nodes=2")
    assert shown.returncode == 0, shown.stdout
    assert "slurm/sft.sh configs/sft_1p5b.yaml" in shown.stdout
    assert "slurm/stable_opd_1p5b.sh configs/stable_opd_1p5b.yaml" in shown.stdout
    lines = re.findall(r"#SBATCH --(\S+)", shown.stdout)
    assert lines.count("nodes=2") == lines.count("time=00:20:00") == 3  # the command line's
    assert lines.count("signal=B:USR1@600") == 2  # the scripts'
    assert lines.count("signal=B:USR1@120") == 1
    assert lines.count("mem=0") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.executor=slurm", "size=9b"], "slurm/stable_opd_9b.sh does not exist; name a config"),
        (["size=7b"], "no executor is given: add run.executor=slurm or"),
        (
            ["run.executor=slurm", "grid=kl.beta+mixture.lambda=0.1"],
            "is not an axis; expected KEY=VALUE",
        ),
        (
            ["run.executor=slurm", "grid=kl.beta=0.1,1", "opd=kl.beta=0"],
            "beta0.1: kl.beta given twice; give it once",
        ),
    ],
)
def test_experiment_with_bad_arguments_is_refused(arguments, message, launcher):
    refused = launcher.launch("sweep", *arguments)
    assert refused.returncode == 1
    assert message in refused.stdout
