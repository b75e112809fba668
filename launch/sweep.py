"""One run for each point of a grid of settings and each seed, and one report of all.

    python launch/sweep.py --yes run.executor=slurm grid="kl.beta=0.001,0.01 mixture.lambda=0.1,1"
    python launch/sweep.py --yes --dryrun run.executor=slurm size=1p5b seeds="0 1 2" \\
        config=configs/recipes/simopd_1p7b.yaml \\
        grid="objective.stop_class=true,false kl.beta+mixture.lambda=0.01+0.1,0+0"

Settings joined by + take their values together: the second grid has four points and 12 runs.
The report plots the curves of all runs in the same charts. On Slurm the runs are parallel; on one
machine they are sequential.
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
    grid: str = "kl.beta=0.001,0.01,0.1 mixture.lambda=0.05,0.1,0.3,1",
    seeds: str = "",
    opd: str = "",
) -> None:
    """A grid of runs and their comparison.

    Args:
        ctx: executor, dry run and detach, from the command line.
        name: experiment name; the runs are <directory>/<name>_<point>.
        size: 7b or 1p5b; selects the batch script and its config.
        directory: run.directory of all runs; the report is <directory>/<name>.html.
        config: default configs/stable_opd_<size>.yaml.
        grid: the axes, separated by spaces: KEY=VALUE,VALUE or KEY+KEY=VALUE+VALUE,VALUE+VALUE.
        seeds: values of train.seed; each point is run with each of them. Empty: the config's.
        opd: settings of all runs.

    Raises:
        ValueError: an axis of another form.
    """
    config = config or f"configs/stable_opd_{size}.yaml"
    axes = [axis(text) for text in grid.split()]
    if seeds:
        axes.append([[("train.seed", seed)] for seed in seeds.split()])
    stages = []
    for settings in map(list, map(itertools.chain.from_iterable, itertools.product(*axes))):
        point = "_".join(short(key, value) for key, value in settings)
        place = [f"run.directory={directory}", f"run.name={name}_{point}"]
        chosen = [f"{key}={value}" for key, value in settings]
        arguments = [config, *shlex.split(opd), *chosen, *place]
        stages.append(Stage(point, f"stable_opd_{size}", "train", arguments))
    points = [stage.name for stage in stages]
    runs = [f"{directory}/{name}_{point}" for point in points]
    arguments = [*runs, f"--output={directory}/{name}.html"]
    stages.append(Stage("report", "report", "report", arguments, after=points))
    run_stages(ctx, name, stages)


def axis(text: str) -> list[list[tuple[str, str]]]:
    """The points of one axis, each as settings: "a+b=1+2,3+4" is [[(a, 1), (b, 2)], ...].

    Raises:
        ValueError: no values, or a point with more or fewer values than keys.
    """
    keys, _, points = text.partition("=")
    names, values = keys.split("+"), [point.split("+") for point in points.split(",")]
    if not points or any(len(point) != len(names) or not all(point) for point in values):
        raise ValueError(
            f"grid: {text!r} is not an axis; expected KEY=VALUE,... or KEY+KEY=VALUE+VALUE,..."
        )
    return [list(zip(names, point, strict=True)) for point in values]


def short(key: str, value: str) -> str:
    """A setting in the name of a run: beta0.01, stop_class_true."""
    last = key.rpartition(".")[2]
    return f"{last}{value}" if value[0].isdigit() else f"{last}_{value}"


if __name__ == "__main__":
    main(sweep)
