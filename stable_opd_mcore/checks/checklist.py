"""The list of checks, and their run over a pair of directories or over a config.

    report = check_pair("models/student", "models/teacher")
    report = check_config(config, place)

`stable-opd check` and `train` call the same list. A file that cannot be read is one error, in the
words in which `train` refuses it; checks that do not need that file still run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stable_opd_mcore.checks import (
    contamination,
    data,
    layout,
    models,
    run_directory,
    sampling,
    software,
    stop_tokens,
    templates,
    tokens,
)
from stable_opd_mcore.checks.finding import Finding, refused
from stable_opd_mcore.checks.known import Known, Place
from stable_opd_mcore.checks.pair import ModelFiles, Pair, read_model, read_pair
from stable_opd_mcore.checks.printing import Report, by_severity, finding_text
from stable_opd_mcore.checks.software import Software, installed
from stable_opd_mcore.config.cold_start import cold_start_config
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError, UserError
from stable_opd_mcore.host.printable_text import printable

OF_A_PAIR: tuple[Callable[[Pair], Iterable[Finding]], ...] = (
    tokens.clashing_ids,
    tokens.tokens_of_one_model,
    tokens.first_token,
    tokens.missing_bos,
    tokens.contradicting_bos,
    stop_tokens.different_stops,
    stop_tokens.end_of_turn_is_no_eos,
    templates.absent_templates,
    templates.different_prompts,
    templates.thought_tokens,
    templates.opened_thoughts,
    templates.deleted_thoughts,
)
OF_A_COLD_START: tuple[Callable[[Known], Iterable[Finding]], ...] = (
    data.usable_rows,
    run_directory.other_settings,
)
OF_A_RUN: tuple[Callable[[Known], Iterable[Finding]], ...] = (
    models.student_settings,
    models.teacher_settings,
    models.weights,
    sampling.embedding_rows,
    sampling.student_window,
    sampling.teacher_window,
    sampling.rotary_base,
    sampling.nucleus,
    layout.layout,
    layout.memory,
    layout.deterministic_attention,
    layout.precision,
    data.usable_rows,
    data.golden_lengths,
    data.repeated_ids,
    data.repeated_problems,
    contamination.benchmark_problems,
    run_directory.writable,
    run_directory.other_run,
    run_directory.other_settings,
    run_directory.disk,
)
OF_THE_SOFTWARE: tuple[Callable[[Software], Iterable[Finding]], ...] = (
    software.apex,
    software.unfused,
)


def check_pair(student: str, teacher: str) -> Report:
    """Two model directories, without a config."""
    read: list[ModelFiles] = []
    findings: list[Finding] = []
    for role, path in (("student", student), ("teacher", teacher)):
        try:
            read.append(read_model(role, path))
        except UserError as error:
            findings.append(refused("files", error))
    return check_models(*read) if len(read) == 2 else Report(tuple(findings))


def check_models(student: ModelFiles, teacher: ModelFiles) -> Report:
    """Two models whose directories are read."""
    pair = read_pair(student, teacher)
    findings = [_no_settings(model) for model in pair.models if not model.settings]
    findings += _found(OF_A_PAIR, pair)
    return Report(tuple(findings), tuple(_pair_facts(pair)), _prompts(pair))


def check_config(config: Config, place: Place | None, accept_changes: bool = False) -> Report:
    """Everything that is known of a run before its models are loaded.

    Args:
        place: the job's GPUs; None: not known, so memory and servers are not checked.
        accept_changes: as of `train`.
    """
    known = Known(config, place, accept_changes)
    findings: list[Finding] = []
    facts: list[str] = []
    prompts: tuple[tuple[str, str], ...] = ()
    try:
        pair = known.pair
    except UserError as error:
        findings.append(refused("files", error))
    else:
        findings += [*_unknown_teacher(pair), *_found(OF_A_PAIR, pair)]
        facts, prompts = _pair_facts(pair), _prompts(pair)
    findings += _found(OF_A_RUN, known)
    if config.cold_start is not None:
        cold = Known(cold_start_config(config), place, accept_changes)
        findings += _found(OF_A_COLD_START, cold)
    here = installed(on_gpu=place is not None and place.on_gpu)
    findings += _found(OF_THE_SOFTWARE, here)
    facts += [*_layout_facts(known), here.line()]
    return Report(tuple(_distinct(findings)), tuple(facts), prompts)


def check_file(path: Path, overrides: Sequence[str], place: Place) -> Report:
    """A config's file with overrides; one that cannot be loaded is an error of the report."""
    try:
        config = load_config(path, overrides)
    except UserError as error:
        return Report((refused("config", error),))
    return check_config(config, place)


def refuse_errors(report: Report) -> None:
    """
    Raises:
        ConfigError: the report has errors; one message names them all.
    """
    if not report.errors:
        return
    if len(report.errors) == 1 and not report.errors[0].values:
        raise ConfigError(printable(report.errors[0].title))
    texts = "\n".join(finding_text(finding) for finding in by_severity(report.errors))
    raise ConfigError(
        f"the checks before the start found {len(report.errors)} errors (`stable-opd check` shows "
        f"all findings):\n{texts}"
    )


def _found(checks: Iterable[Callable[[Any], Iterable[Finding]]], subject: object) -> list[Finding]:
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check(subject)
        except UserError as error:
            findings.append(refused(check.__module__.rpartition(".")[2].replace("_", " "), error))
    return _distinct(findings)


def _distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Each once: several checks may need the same broken file."""
    seen: dict[str, Finding] = {}
    for finding in findings:
        key = finding.title if not finding.values else repr(finding)
        seen.setdefault(key, finding)
    return list(seen.values())


def _pair_facts(pair: Pair) -> list[str]:
    lines = [
        f"{model.role}  {model.place}: {model.tokenizer.vocab_size} tokens in "
        f"{model.settings.get('vocab_size', 'an unknown number of')} rows"
        for model in pair.models
    ]
    return [*lines, *stop_tokens.stop_class(pair)]


def _layout_facts(known: Known) -> list[str]:
    try:
        return layout.facts(known)
    except UserError:  # a finding says so
        return []


def _prompts(pair: Pair) -> tuple[tuple[str, str], ...]:
    """An example exchange by each template; the student's alone where the teacher has the same."""
    shown = []
    for model in pair.models_with_own_tokenizer:
        try:
            text = templates.example_turns(model) if model.tokenizer.has_template else "no template"
        except UserError:  # a finding says so
            text = "the template fails"
        shown.append((model.role, text))
    return tuple(shown)


def _no_settings(model: ModelFiles) -> Finding:
    return Finding(
        "note",
        "files",
        f"{model.place} has no config.json",
        ((model.role, "no config.json"), ("expected", "the model's config.json")),
        "its stop ids, BOS and number of rows there are not compared",
        f"download config.json of the {model.role}",
    )


def _unknown_teacher(pair: Pair) -> list[Finding]:
    if pair.teacher_gap is None:
        return []
    return [
        Finding(
            "warning",
            "files",
            "the teacher's tokenizer is not known",
            (("teacher", pair.teacher_gap), ("assumed", "the student's tokenizer and template")),
            "ids that mean other tokens to the teacher are not found",
            "teacher.path, a directory with its tokenizer.json and config.json",
        )
    ]
