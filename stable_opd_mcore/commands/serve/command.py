"""The command `serve`: its options."""

from typing import Annotated

import typer

from stable_opd_mcore.commands.options import ConfigPath, Overrides


def serve(
    config: ConfigPath,
    overrides: Overrides = None,
    teacher: Annotated[
        bool, typer.Option("--teacher", help="Serve teacher.path instead of the student.")
    ] = False,
) -> None:
    """Start the SGLang servers of rollout.sglang for other runs; they end with this command."""
    from stable_opd_mcore.config.load import load_config

    settings = load_config(config, overrides or [])
    from stable_opd_mcore.commands.serve.serve import serve as run_servers
    from stable_opd_mcore.inputs.downloads import with_downloads

    run_servers(with_downloads(settings), teacher=teacher, say=typer.echo)
