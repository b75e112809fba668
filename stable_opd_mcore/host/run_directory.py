"""Where the files of a run are: every name in its directory but the lock's (run_lock.py).

The directories of checkpoints, models and servers have files of their own.
"""

from pathlib import Path

ANY_STEP = "step_*"  # matches every `checkpoint_name`


def checkpoint_name(step: int) -> str:
    """The directory of the checkpoint after `step`."""
    return f"step_{step:06d}"


# Outcomes of a batch job; each file holds {"step": N}.
REQUEUE = "REQUEUE"  # stopped between two steps with a complete checkpoint; start it again
DONE = "DONE"  # reached its end; all results are written


class RunDirectory:
    """The directory of a run, or of an evaluation."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.resolved = self.path / "config.resolved.yaml"  # the settings of the newest start
        self.inputs = self.path / "inputs.json"  # hashes of the files that the settings name
        self.own_code = self.path / "own_code"  # copies of the user's functions
        self.environments = self.path / "environments"  # what their workers print and raise
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.wandb_id = self.path / "wandb_id"  # the tracker's id of this run
        self.mlflow_id = self.path / "mlflow_id"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"  # the trained student in Hugging Face form
        self.adapter = self.path / "adapter"  # with student.lora: its factors in PEFT's form
        self.summary = self.path / "summary.json"  # the last value of every metric
        self.report = self.path / "report.html"
        self.cold_start = self.path / "cold_start"  # a run directory of its own
        self.evaluation = self.path / "evaluation"  # directories of evaluations
        self.responses = self.path / "responses"  # an evaluation's, one folder a benchmark
        self.results = self.path / "results.json"  # an evaluation's
        self.results_page = self.path / "results.md"
        self.servers = self.path / "sglang"  # logs of the servers of the rollouts
        self.teacher_servers = self.path / "teacher"
        self.stacks = self.path / "stacks"  # stack traces of ranks that hang

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"{checkpoint_name(step)}.jsonl"

    def tokens(self, step: int) -> Path:
        """The values of single tokens of a training step's first rollouts."""
        return self.path / "tokens" / f"{checkpoint_name(step)}.jsonl"
