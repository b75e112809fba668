"""SFT, then Stable-OPD from its model, then evaluation: one NeMo-Run experiment.

    python launch/pipeline.py --dryrun run.executor=slurm run.executor.partition=h200
    python launch/pipeline.py --yes run.executor=slurm opd="kl.beta=0.03 train.seed=1"
    python launch/pipeline.py --yes run.executor=local size=1p5b common="train.steps=100"

A stage starts when the one before it has ended well; one that fails, fails the experiment and
cancels what follows. Not here: how a stage runs (stages.py).
"""

import shlex

import nemo_run as run
from stages import Stage, add, batch_settings, judge, launch, main


@run.cli.entrypoint(namespace="stable_opd", type="experiment")
def pipeline(
    ctx: run.cli.RunContext,
    name: str = "pipeline",
    size: str = "7b",
    directory: str = "runs",
    sft_config: str = "configs/sft_7b.yaml",
    opd_config: str = "",
    common: str = "",
    sft: str = "",
    opd: str = "",
    evaluation: str = "",
) -> None:
    """SFT, Stable-OPD and evaluation.

    Args:
        ctx: what the command line said: executor, dry run, detached.
        name: of the experiment; its runs are <directory>/<name>_sft, _opd and _evaluation.
        size: 7b or 1p5b, the batch script of the distillation.
        directory: run.directory of all three.
        sft_config: a file in configs/.
        opd_config: configs/stable_opd_<size>.yaml unless given.
        common: settings of all three stages, such as data.eval.path=...
        sft: settings of the supervised stage.
        opd: settings of the distillation.
        evaluation: settings of the evaluation.
    """
    opd_config = opd_config or f"configs/stable_opd_{size}.yaml"

    def overrides(stage: str, more: str, student: str = "") -> list[str]:
        start = [f"student.path={student}", "student.architecture=null"] if student else []
        place = [f"run.directory={directory}", f"run.name={name}_{stage}"]
        return [*shlex.split(common), *shlex.split(more), *start, *place]

    stages = (
        Stage("sft", "sft", "train", sft_config, overrides("sft", sft)),
        Stage(
            "opd",
            f"stable_opd_{size}",
            "train",
            opd_config,
            overrides("opd", opd, student=f"{directory}/{name}_sft/model"),
        ),
        Stage(
            "evaluation",
            "evaluate",
            "evaluate",
            opd_config,
            overrides("evaluation", evaluation, student=f"{directory}/{name}_opd/model"),
        ),
    )
    with run.Experiment(name, executor=ctx.executor) as experiment:
        before: list[str] = []
        for stage in stages:
            before = [add(experiment, stage, ctx.executor, before, batch_settings())]
        launch(experiment, ctx)
    judge(experiment, ctx)


if __name__ == "__main__":
    main(pipeline)
