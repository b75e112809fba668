"""Stable-OPD over a grid of beta (KL to the reference) and lambda (golden mixture), and one report.

    python launch/sweep.py --yes run.executor=slurm betas="0.001 0.01" lambdas="0.1 1"
    python launch/sweep.py --yes --dryrun run.executor=slurm size=1p5b opd="train.steps=200"

Each grid point is one run. The report draws the curves of all runs in the same charts. On Slurm the
runs are parallel; on one machine they are sequential.
Not here: how a stage runs (stages.py).
"""

import itertools
import shlex

import nemo_run as run  # pyright: ignore[reportMissingImports]
from stages import Stage, main, run_stages


@run.cli.entrypoint(namespace="stable_opd", type="experiment")
def sweep(
    ctx: run.cli.RunContext,
    name: str = "sweep",
    size: str = "7b",
    directory: str = "runs",
    config: str = "",
    betas: str = "0.001 0.01 0.1",
    lambdas: str = "0.05 0.1 0.3 1",
    opd: str = "",
) -> None:
    """A grid of runs and their comparison.

    Args:
        ctx: executor, dry run and detach, from the command line.
        name: experiment name; the runs are <directory>/<name>_beta<b>_lambda<l>.
        size: 7b or 1p5b; selects the batch script and its config.
        directory: run.directory of all runs; the report is <directory>/<name>.html.
        config: default configs/stable_opd_<size>.yaml.
        betas: values of kl.beta.
        lambdas: values of mixture.lambda.
        opd: settings of all runs.
    """
    config = config or f"configs/stable_opd_{size}.yaml"
    stages = []
    for beta, lambda_ in itertools.product(map(float, betas.split()), map(float, lambdas.split())):
        point = f"beta{beta:g}_lambda{lambda_:g}"
        grid = [f"kl.beta={beta:g}", f"mixture.lambda={lambda_:g}"]
        place = [f"run.directory={directory}", f"run.name={name}_{point}"]
        arguments = [config, *shlex.split(opd), *grid, *place]
        stages.append(Stage(point, f"stable_opd_{size}", "train", arguments))
    points = [stage.name for stage in stages]
    runs = [f"{directory}/{name}_{point}" for point in points]
    arguments = [*runs, f"--output={directory}/{name}.html"]
    stages.append(Stage("report", "report", "report", arguments, after=points))
    run_stages(ctx, name, stages)


if __name__ == "__main__":
    main(sweep)
