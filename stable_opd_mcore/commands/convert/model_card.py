"""The card of a trained model or adapter, and its upload to the hub.

The card names the base, the data, the objective, the commit of this code and a report. What no run
of ours has trained has no data and no objective in it. Paths of this machine are not shown, only
their last part. Not here: the upload itself (host/hub_upload.py).
"""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stable_opd_mcore.config.source_objectives import objective_names
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.hub import HUB_ID, id_in_cache, is_hub_id
from stable_opd_mcore.host.hub_upload import ADAPTER_CONFIG, upload
from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.models.files.megatron_checkpoint import is_megatron
from stable_opd_mcore.models.files.peft_directory import is_adapter, named_base
from stable_opd_mcore.train.persistence.stored_models import model_in, run_settings

PACKAGE = "stable-opd-mcore"


@dataclass(frozen=True)
class Upload:
    """What `convert --push-to-hub` uploads, decided before anything is converted."""

    source: Path  # what was trained, for the card
    directory: Path  # what is uploaded
    name: str  # of the repository, OWNER/NAME
    report_url: str | None

    @classmethod
    def of(
        cls, source: Path, target: Path | None, name: str | None, report_url: str | None
    ) -> "Upload | None":
        """None without a name. Raises a UserError for Megatron's form, which the hub's users cannot
        load."""
        if name is None:
            return None
        is_loadable = is_adapter(source) or ((source / "config.json").is_file())
        is_loadable = is_loadable and not is_megatron(source)
        if target is None and not is_loadable:
            raise UserError(
                f"--push-to-hub {name}: {source} is neither a Hugging Face model nor an adapter; "
                "name a TARGET to convert it to"
            )
        if target is not None and is_loadable and not is_adapter(source):
            raise UserError(
                f"--push-to-hub {name}: {target} would be a Megatron checkpoint, which others "
                "cannot load; leave TARGET out to upload the Hugging Face model"
            )
        return cls(source, target or source, name, report_url)

    def run(self) -> str:
        card = model_card(self.source, self.directory, self.report_url)
        model = model_in(self.source)
        said = "Upload" if model.run is None else f"Upload {model.run}, step {model.step}"
        written = {"README.md": card, **_adapter_configs(self.directory)}
        return f"uploaded: {upload(self.directory, self.name, written, said)}"


def _adapter_configs(directory: Path) -> dict[str, str]:
    """An adapter's configurations, naming its base on the hub where they name a folder of the hub's
    cache."""
    written: dict[str, str] = {}
    for file in (*directory.glob(ADAPTER_CONFIG), *directory.glob(f"*/{ADAPTER_CONFIG}")):
        if found := id_in_cache(named_base(file.parent) or ""):
            named = {"base_model_name_or_path": found[0], "revision": found[1]}
            text = json.dumps(read_json_object(file) | named, indent=2) + "\n"
            written[file.relative_to(directory).as_posix()] = text
    return written


def model_card(source: Path, directory: Path, report_url: str | None) -> str:
    """The text of README.md, with its metadata.

    Args:
        source: what was trained: its run's settings say how.
        directory: what is uploaded, a model or an adapter.
    """
    from huggingface_hub import ModelCardData

    settings, model, adapter = run_settings(source), model_in(source), is_adapter(directory)
    student = settings.get("student", {})
    base = student.get("path") or (named_base(source) if is_adapter(source) else None)
    on_hub, _ = id_in_cache(base or "") or (base, None)
    metadata = ModelCardData(
        base_model=on_hub if on_hub and is_hub_id(on_hub) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["on-policy-distillation", PACKAGE],
    )
    what = "Low-rank factors (an adapter)" if adapter else "A model"
    rows = {
        "Base": _shown(base, student.get("revision")),
        **(_training(settings) if settings else {}),
    }
    if model.run is not None:
        rows["Run"] = model.run if model.step is None else f"{model.run}, step {model.step}"
    rows["Code"] = f"{PACKAGE} {version(PACKAGE)}, commit {_commit() or 'unknown'}"
    rows["Report"] = report_url or "none"
    lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    table = "\n".join(["| | |", "|---|---|", *lines])
    return (
        f"---\n{metadata.to_yaml()}\n---\n# {directory.absolute().name}\n\n"
        f"{what} written by {PACKAGE}.\n\n{table}\n"
    )


def _training(settings: Mapping[str, Any]) -> dict[str, str]:
    """Teacher, data and objective of a run's settings."""
    teacher = settings.get("teacher") or {}
    sources = settings["data"]["train"]
    sources = sources if isinstance(sources, list) else [sources]
    objective = {
        "objective.name": objective_names(settings["objective"]["name"], sources),
        "kl.beta": settings["kl"]["beta"],
        "mixture.lambda": settings["mixture"]["lambda"],
    }
    return {
        "Teacher": _shown(teacher.get("path")),
        "Data": ", ".join(_shown(each["path"]) for each in sources),
        "Objective": ", ".join(f"{key}={value}" for key, value in objective.items()),
    }


def _shown(path: str | None, revision: str | None = None) -> str:
    """A hub id or a generator's name as it is, the last part of a path, or "none named"."""
    if path is None:
        return "none named"
    if found := id_in_cache(path):
        path, revision = found
    if revision is not None:
        return f"{path} at {revision}"
    return path if re.fullmatch(HUB_ID, path) or ":" in path else Path(path).name


def _commit() -> str | None:
    """The commit of this checkout, with a mark if files have changed since; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # no git
        return None
    return found.stdout.strip() or None
