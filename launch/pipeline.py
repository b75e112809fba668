"""SFT, then Stable-OPD from its model, then evaluation: one NeMo-Run experiment.

    python launch/pipeline.py --yes --dryrun run.executor=slurm run.executor.partition=h200
    python launch/pipeline.py --yes run.executor=slurm opd="kl.beta=0.03 train.seed=1"
    python launch/pipeline.py --yes run.executor=local size=1p5b common="train.steps=100"

A stage starts when the one before it has succeeded. A stage that fails fails the experiment and
cancels the later stages.
Not here: how a stage runs (stages.py).
"""

import shlex

import nemo_run as run  # pyright: ignore[reportMissingImports]
from stages import Stage, main, run_stages


@run.cli.entrypoint(namespace="stable_opd", type="experiment")
def pipeline(
    ctx: run.cli.RunContext,
    name: str = "pipeline",
    size: str = "7b",
    directory: str = "runs",
    sft_config: str = "",
    opd_config: str = "",
    common: str = "",
    sft: str = "",
    opd: str = "",
    evaluation: str = "",
) -> None:
    """SFT, Stable-OPD and evaluation.

    Args:
        ctx: executor, dry run and detach, from the command line.
        name: experiment name; the runs are <directory>/<name>_sft, _opd and _evaluation.
        size: 7b or 1p5b; selects the batch script of the distillation and both configs.
        directory: run.directory of all three runs.
        sft_config: config of the supervised stage; default configs/sft_<size>.yaml.
        opd_config: config of the other two; default configs/stable_opd_<size>.yaml.
        common: settings of all three stages, such as data.eval.path=...; a stage's own win.
        sft: settings of the supervised stage.
        opd: settings of the distillation.
        evaluation: settings of the evaluation.
    """
    sft_config = sft_config or f"configs/sft_{size}.yaml"
    opd_config = opd_config or f"configs/stable_opd_{size}.yaml"

    def arguments(stage: str, config: str, settings: str, start_from: str = "") -> list[str]:
        model = f"{directory}/{name}_{start_from}/model"
        start = [f"student.path={model}", "student.architecture=null"] if start_from else []
        place = [f"run.directory={directory}", f"run.name={name}_{stage}"]
        own = [*shlex.split(settings), *start]
        named = {setting.partition("=")[0] for setting in own}
        shared = [each for each in shlex.split(common) if each.partition("=")[0] not in named]
        return [config, *shared, *own, *place]

    stages = (
        Stage("sft", "sft", "train", arguments("sft", sft_config, sft)),
        Stage(
            "opd",
            f"stable_opd_{size}",
            "train",
            arguments("opd", opd_config, opd, start_from="sft"),
            after=["sft"],
        ),
        Stage(
            "evaluation",
            "evaluate",
            "evaluate",
            [
                *arguments("evaluation", opd_config, evaluation, start_from="opd"),
                f"evaluation.model={directory}/{name}_opd",
            ],
            after=["opd"],
        ),
    )
    run_stages(ctx, name, stages)


if __name__ == "__main__":
    main(pipeline)
