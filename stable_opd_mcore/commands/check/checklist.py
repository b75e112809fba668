"""The list of checks, and their run over a pair of directories or over a config.

    report = check_pair("models/student", "models/teacher")
    report = check_config(config, place)

`stable-opd check` and `train` call the same list. A file that cannot be read is one error, in the
words in which `train` refuses it; checks that do not need that file still run.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from stable_opd_mcore.commands.check import (
    data_rows,
    engines,
    gpu_fit,
    model_directories,
    output_directory,
    sampling,
    software,
    stops,
    templates,
    tokens,
    transcripts,
)
from stable_opd_mcore.commands.check.finding import Finding, finding, refused
from stable_opd_mcore.commands.check.printing import Report, finding_text
from stable_opd_mcore.commands.check.software import installed
from stable_opd_mcore.config.cold_start import cold_start_config
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import ConfigError, UserError
from stable_opd_mcore.host.printable_text import printable
from stable_opd_mcore.inputs.pair import EXAMPLE, ModelFiles, Pair, read_model
from stable_opd_mcore.inputs.run_inputs import Place, RunInputs
from stable_opd_mcore.losses.stop_tokens import shared_stop_ids
from stable_opd_mcore.placement.hardware import Cluster
from stable_opd_mcore.records import Sample

# Each returns its findings. An error that `train` has too is raised.
Check = Callable[[Any], Iterable[Finding] | None]
# Subject, as `refused` names it -> checks of a Pair, a model, RunInputs, or the Software
Checks = dict[str, tuple[Check, ...]]
OF_A_PAIR: Checks = {
    "tokens": (
        tokens.clashing_ids,
        tokens.first_token,
        tokens.missing_bos,
    ),
    "stop tokens": (
        stops.different_stops,
        stops.end_of_turn_is_not_eos,
        stops.unread_stops,
        stops.two_special_tokens,
        stops.ignored_generation_settings,
    ),
    "chat template": (
        templates.absent_template,
        templates.absent_header,
        templates.two_templates,
        templates.different_prompts,
        templates.thought_tokens,
        templates.opened_thoughts,
        templates.different_endings,
    ),
}
OF_A_DIRECTORY: Checks = {"models": (model_directories.of_directory,)}  # without a config
OF_A_COLD_START: Checks = {
    "data": (data_rows.usable_rows,),
    "run directory": (output_directory.other_settings,),
}
OF_A_RUN: Checks = {
    "models": (
        model_directories.settings_of_models,
        model_directories.reference_settings,
        model_directories.weights,
        model_directories.adapter,
        model_directories.adapters_of_teachers,
        model_directories.untrained_stops,
        model_directories.same_weights,
    ),
    "sampling": (
        sampling.embedding_rows,
        sampling.student_window,
        sampling.teacher_window,
        sampling.rotary_base,
        sampling.nucleus,
        sampling.mixed_groups,
        sampling.slow_factors,
        sampling.rounded_factors,
        sampling.support,
    ),
    "environment": (
        transcripts.failing_environments,
        transcripts.rewritten_histories,
        transcripts.tool_messages,
        transcripts.two_ends,
        transcripts.restarts,
    ),
    "chat template": (transcripts.different_bridges,),
    "layout": (
        gpu_fit.layout,
        gpu_fit.memory,
        gpu_fit.precision,
    ),
    "data": (
        data_rows.usable_rows,
        data_rows.golden_lengths,
        data_rows.repeated_problems,
        data_rows.repeated_held_out,
    ),
    "contamination": (data_rows.benchmark_problems,),
    "engines": (
        engines.student_servers_key,
        engines.teacher_servers_key,
        engines.allocator,
        engines.draft,
        engines.stored_rollouts,
        engines.trackers,
    ),
    "run directory": (
        output_directory.writable,
        output_directory.other_run,
        output_directory.other_settings,
        output_directory.rare_checkpoints,
        output_directory.disk,
    ),
}
OF_THE_SOFTWARE: Checks = {"software": (software.apex, software.unfused)}


def check_pair(student: str, teacher: str) -> Report:
    """Two model directories, without a config."""
    read: list[ModelFiles] = []
    findings: list[Finding] = []
    for role, path in (("student", student), ("teacher", teacher)):
        try:
            read.append(read_model(role, path))
        except UserError as error:
            findings.append(refused("files", error))
    for model in read:
        findings += _found(OF_A_DIRECTORY, model)
    if len(read) < 2:
        return Report(tuple(findings))
    report = check_models(*read)
    return replace(report, findings=(*report.findings, *findings))


def check_models(student: ModelFiles, teacher: ModelFiles) -> Report:
    """Two models whose directories are read; the loss merges their stop ids, its default."""
    pair = Pair(student, teacher, shared_stop_ids(student.stop_ids, teacher.stop_ids))
    findings = [
        finding("no-settings", place=model.place, role=model.role)
        for model in pair.models
        if not model.settings
    ]
    findings += _found(OF_A_PAIR, pair)
    return Report(tuple(findings), tuple(_facts(pair)), _prompts(pair, EXAMPLE))


def check_config(config: Config, place: Place | None, accept_changes: bool = False) -> Report:
    """The report of `check_run`; see `RunInputs` for `place` and `accept_changes`."""
    return check_run(RunInputs(config, place, accept_changes))


def check_run(inputs: RunInputs) -> Report:
    """Everything that is known of a run before its models are loaded."""
    config, place = inputs.config, inputs.place
    findings, facts, prompts, shown = [], [], (), ()
    try:
        pair = inputs.pair
    except UserError as error:
        findings.append(refused("files", error))
    else:
        if pair.teacher_gap is not None:
            findings.append(finding("unknown-teacher", gap=pair.teacher_gap))
        findings += _found(OF_A_PAIR, pair)
        for name, one in inputs.named_pairs.items():
            of_student = _found(OF_A_PAIR, replace(one, teacher=None))
            own = [each for each in _found(OF_A_PAIR, one) if each not in of_student]
            findings += [replace(e, subject=f"{e.subject} of teacher.models.{name}") for e in own]
        facts, prompts = _facts(pair), _prompts(pair, inputs.example, inputs.teacher_example)
        for name, one in inputs.named_pairs.items():
            facts += [f"teacher.models.{name}: {line}" for line in _facts(one) if line not in facts]
        shown = _transcripts(pair, inputs.transcript)
    findings += _found(OF_A_RUN, inputs)
    if config.cold_start is not None:
        cold = RunInputs(cold_start_config(config), place, inputs.accept_changes)
        findings += _found(OF_A_COLD_START, cold)
    here = installed(on_gpu=place is not None and place.on_gpu)
    findings += _found(OF_THE_SOFTWARE, here)
    for read in (data_rows.facts, transcripts.facts, gpu_fit.facts):
        with suppress(UserError):  # a finding says so
            facts += read(inputs)
    return Report(tuple(_distinct(findings)), (*facts, here.line()), prompts, shown)


def check_file(
    path: Path,
    overrides: Sequence[str],
    cluster: Cluster,
    gpu: str | None = None,
    accept_changes: bool = False,
) -> Report:
    """A config's file with overrides; one that cannot be loaded is an error of the report.

    `gpu` None: as the config's train.precision says; fp32 is for a CPU.
    """
    try:
        config = load_config(path, overrides)
    except UserError as error:
        return Report((refused("config", error),))
    if gpu is None:
        gpu = "cpu" if config.train.precision == "fp32" else "h200"
    return check_config(config, Place(cluster, gpu), accept_changes)


def refuse_errors(report: Report) -> None:
    """Raise the report's errors, if any, as one ConfigError that names them all; not those that may
    pass."""
    errors = [each for each in report.errors if not each.may_pass]
    if not errors:
        return
    if len(errors) == 1 and not errors[0].values:
        raise ConfigError(printable(errors[0].title))
    texts = "\n".join(map(finding_text, errors))
    raise ConfigError(
        f"the checks before the start found {len(errors)} errors (`stable-opd check` shows "
        f"all findings):\n{texts}"
    )


def _found(checks: Checks, of: object) -> list[Finding]:
    findings: list[Finding] = []
    for subject, functions in checks.items():
        for check in functions:
            try:
                findings += check(of) or ()
            except UserError as error:
                findings.append(refused(subject, error))
    return _distinct(findings)


def _distinct(findings: Iterable[Finding]) -> list[Finding]:
    """Each once: several checks may need the same broken file."""
    seen: dict[str, Finding] = {}
    for each in findings:
        seen.setdefault(repr(each) if each.values else each.title, each)
    return list(seen.values())


def _facts(pair: Pair) -> list[str]:
    lines = [
        f"{model.role}  {model.place}: {model.tokenizer.vocab_size} tokens in "
        f"{model.settings.get('vocab_size', 'an unknown number of')} rows"
        for model in pair.models
    ]
    return [*lines, *stops.stop_class(pair)]


def _prompts(
    pair: Pair, problem: str, of_teacher: str | None = None
) -> tuple[tuple[str, str], ...]:
    """A problem's prompt by each template; only the student's where the teacher has the same.

    `of_teacher` is the teacher's prompt, where it has one of its own.
    """
    shown = []
    for model in pair.models_with_own_tokenizer:
        try:
            text = of_teacher if model is pair.teacher else None
            text = templates.shown_prompt(model, text or model.prompt_of(problem))
        except UserError:  # a finding says so
            text = "the template fails"
        shown.append((model.role, text))
    return tuple(shown)


def _transcripts(pair: Pair, samples: Sequence[Sample]) -> tuple[tuple[str, str], ...]:
    """Samples of one conversation as each model reads it; see `_prompts`."""
    models = pair.models_with_own_tokenizer if samples else ()
    return tuple((model.role, transcripts.shown_transcript(model, samples)) for model in models)
