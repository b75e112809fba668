"""Settings of evaluation and monitoring. Loads without torch."""

from typing import Any

from pydantic import Field, PositiveInt

from stable_opd_mcore.config.section import Section


class EvaluationConfig(Section):
    """Evaluation on held-out problems: while training, and by `stable-opd evaluate`."""

    model: str | None = None
    """What `stable-opd evaluate` evaluates: a run's directory, a Hugging Face directory or a
    Megatron checkpoint. `null`: the trained model of this config's own run."""
    every: int = Field(default=50, ge=0)
    """Steps between evaluations of `data.eval`; step 0 and the last step are evaluated too.
    0: no evaluation."""
    num_samples: int | None = Field(default=None, gt=0, le=65536)
    """Responses per problem, the k of avg@k. `null`: the benchmark's own number, else 1."""
    benchmarks: tuple[str, ...] = ()
    """What `stable-opd evaluate` runs instead of `data.eval`: aime24, aime25, amc, math500,
    minerva, olympiadbench."""
    benchmark_directory: str | None = None
    """Directory with <name>.jsonl or <name>.parquet of the benchmarks; `null`: the hub or its local
    cache."""
    temperature: float = Field(default=0.6, ge=0)
    """Temperature of held-out responses; 0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling of held-out responses."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template for held-out prompts. `null`: the student's."""
    max_new_tokens: PositiveInt | None = None
    """Longest held-out response; `null`: `sampling.max_new_tokens`."""
    also_greedy: bool = False
    """While training: evaluate greedy responses too, as `eval_greedy/*`."""


class MonitoringConfig(Section):
    """Metrics and where they go."""

    tensorboard: bool = True
    """Write TensorBoard events to the run directory."""
    wandb: bool = False
    """Write to Weights & Biases; needs the wandb package. Its own variables name the account, the
    project (WANDB_PROJECT) and more: docs/monitoring.md."""
    trackio: bool = False
    """Write to Trackio; needs the trackio package. It writes on this machine unless Trackio's
    environment variables name a Space or a server: docs/monitoring.md."""
    swanlab: bool = False
    """Write to SwanLab; needs the swanlab package. SwanLab's environment variables name the account
    and the project: docs/monitoring.md."""
    mlflow: str | None = None
    """Address of an MLflow server or database to write to, such as http://HOST:5000 or
    sqlite:///mlflow.db; needs the mlflow package. `null`: none."""
    sample_every: int = Field(default=20, ge=0)
    """Steps between rollouts that are shown on the terminal; 0: none."""
