"""What a run reads before it builds a model: tokenizer, stop ids, prompts, architectures.

`train` and `stable-opd check` call the same functions, so that both refuse the same settings and
data, in the same words. Not here: models, engines, the objective (train/setup.py).
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from stable_opd_mcore.config.data import SourceConfig
from stable_opd_mcore.config.schema import Config, ModelConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.environment_names import OF_THE_RUN
from stable_opd_mcore.data.prompts import PromptOrder, PromptSet
from stable_opd_mcore.data.rollout_prompts import RolloutPrompts
from stable_opd_mcore.data.rows import Row
from stable_opd_mcore.data.source_order import SourceOrder
from stable_opd_mcore.data.sources import load_rows, source_name
from stable_opd_mcore.data.stop_ids import resolve_stop_ids
from stable_opd_mcore.data.synthetic import SYNTHETIC
from stable_opd_mcore.data.teacher_prompt import TeacherPrompt
from stable_opd_mcore.data.tokenizer_backend import has_tokenizer
from stable_opd_mcore.data.vocabulary import read_vocabulary, same_vocabulary
from stable_opd_mcore.errors import DataError, UserError
from stable_opd_mcore.inputs.source_uses import golden_of, uses_of
from stable_opd_mcore.losses.source_objectives import SourceObjectives
from stable_opd_mcore.models.description.architecture import Architecture, read_architecture
from stable_opd_mcore.models.description.config_fields import decoder_settings, read_fields
from stable_opd_mcore.records import Use
from stable_opd_mcore.serving.requests import UNUSED_POSITIONS

# package and setting -> its value for none
_TRACKERS = {"wandb": "false", "trackio": "false", "swanlab": "false", "mlflow": "null"}
_NO_USES = dict[str, Use]()
_log = logging.getLogger(__name__)


def load_tokenizer(config: Config) -> Tokenizer:
    """The student's tokenizer, with the student's stop ids.

    Raises:
        DataError: as `Tokenizer.load`.
        UserError: tokenizer.path has other ids than the student's own tokenizer.json.
    """
    student = config.student
    path = config.tokenizer.path or student.path
    assert path is not None, "the schema asks for one of the two"
    tokenizer = Tokenizer.load(path, student.stop_token_ids, student.chat_template_kwargs)
    own = student.path
    if own is not None and own != path and has_tokenizer(own):
        with suppress(DataError):  # tokenizer.path is the remedy for one that cannot be loaded
            vocabulary = read_vocabulary(own)
            same_vocabulary(
                tokenizer, vocabulary, "remove tokenizer.path, or set it to the student's tokenizer"
            )
    return tokenizer


def load_teacher_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer in the teacher's directory; None if it has none, or without another teacher."""
    path = config.teacher.path if config.teacher and not config.teacher.is_self else None
    if path is None or not has_tokenizer(path):
        return None
    assert config.teacher is not None
    return Tokenizer.load(path, config.teacher.stop_token_ids, config.teacher.chat_template_kwargs)


def teacher_stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """The ids that end the teacher's responses; None without a teacher."""
    if config.teacher is None:
        return None
    own = load_teacher_tokenizer(config)
    if own is not None:
        same_vocabulary(tokenizer, own)
        return own.stop_token_ids
    path, given = config.teacher.path, config.teacher.stop_token_ids
    if config.teacher.is_self and given is None:
        return tokenizer.stop_token_ids
    if path is not None or given is not None:
        return resolve_stop_ids(path, tokenizer, given)
    return tokenizer.stop_token_ids


def named_teacher_stops(
    config: Config, tokenizer: Tokenizer, teacher: Tokenizer | None
) -> dict[str, tuple[int, ...]]:
    """The ids that end the responses of each of `teacher.models`.

    Args:
        teacher: the tokenizer of `teacher.path`, which writes what the teachers read of their own.

    Raises:
        UserError: another vocabulary than the student's, or another chat template than it has.
    """
    found: dict[str, tuple[int, ...]] = {}
    reads_own = config.teacher and (config.teacher.prompt or config.has_environment)
    for name in config.teacher.models if config.teacher else ():
        one = config.with_teacher(name)
        own = load_teacher_tokenizer(one)
        found[name] = teacher_stop_ids(one, tokenizer) or ()
        used = teacher or tokenizer
        if reads_own and own and own.render_prompt("1+1") != used.render_prompt("1+1"):
            raise UserError(
                f"teacher.models.{name} has another chat template than teacher.path, which writes "
                "teacher.prompt and episodes for all: drop teacher.prompt, or serve this teacher"
            )
    return found


def load_teacher_prompt(
    config: Config, tokenizer: Tokenizer, objective: SourceObjectives
) -> TeacherPrompt | None:
    """A template in `teacher.prompt` with the teacher's chat template; None without one."""
    teacher = config.teacher
    template = None if teacher is None else teacher.prompt
    if not isinstance(template, str) or objective.teacher_needs == "none":
        return None
    own = _teacher_template(config, tokenizer)
    assert own is not None
    return TeacherPrompt(template, own, config.data.system_prompt, _teacher_window(config))


def load_rollout_prompts(
    config: Config, tokenizer: Tokenizer, objective: SourceObjectives
) -> RolloutPrompts | None:
    """The function in `teacher.prompt` with the teacher's chat template; None without one."""
    function = config.teacher and config.teacher.prompt_function
    if function is None or objective.teacher_needs == "none":
        return None
    own = _teacher_template(config, tokenizer)
    assert own is not None
    window = _teacher_window(config)
    return RolloutPrompts(function.read(), own, config.data.system_prompt, window)


def episode_template(
    config: Config, tokenizer: Tokenizer, objective: SourceObjectives
) -> Tokenizer | None:
    """The tokenizer with whose chat template the teacher reads episodes; None: it reads none, or
    the student's template is used."""
    if not config.has_environment or objective.teacher_needs == "none":
        return None
    return _teacher_template(config, tokenizer)


def _teacher_template(config: Config, tokenizer: Tokenizer) -> Tokenizer | None:
    """The tokenizer whose chat template the teacher was trained on or gets; None: the student's."""
    own = load_teacher_tokenizer(config)
    if own is None and config.teacher is not None and config.teacher.prompt is not None:
        own = tokenizer.with_template_kwargs(config.teacher.chat_template_kwargs)
    return own


def _teacher_window(config: Config) -> int | None:
    """The positions that the teacher scores; None where only its address is known."""
    teacher = config.teacher
    assert teacher is not None
    if not teacher.is_served:
        others = [own for role, own in config.models_in_trainer.items() if role != "student"]
        models = others or [config.teacher_model or teacher]
        return min(configured_architecture(model).max_positions for model in models)
    if teacher.path is None or not (Path(teacher.path) / "config.json").is_file():
        return None
    window = decoder_settings(read_fields(teacher.path)[1]).get("max_position_embeddings")
    return window - UNUSED_POSITIONS if type(window) is int else None


def load_sources(
    config: Config, required: Collection[str] = (), uses: Mapping[str, Use] = _NO_USES
) -> list[Row]:
    """The rows of all sources of `data.train`, one source after the other; see `load_rows`.

    required: columns of the rows that the teacher's own prompt is made of.
    uses: by the name of a source; not given: all are taught.
    """
    rows: dict[str, list[Row]] = {}
    for source in config.data.sources:
        name = source_name(source)
        if name in rows:
            raise UserError(
                f"data.train: two sources are named {name}; give each a `name` of its own"
            )
        environment = config.environment_of(source)
        functions = (source.reward or config.reward, environment)
        reads_columns = config.teacher and config.teacher.prompt_function
        with_columns = any(
            each.function is not None for each in (*functions, reads_columns) if each
        )
        needed = required if uses.get(name, Use()).is_taught else ()
        own = load_rows(source, with_columns=with_columns, required=needed)
        ids = [f"{name}:{row.row_id.rpartition(':')[2]}" for row in own]
        played_in = name if source.environment is not None else OF_THE_RUN
        if environment.function is None:
            played_in = None
        rows[name] = [
            replace(
                row,
                row_id=row_id,
                environment=played_in,
                max_new_tokens=environment.own_budget,
            )
            for row, row_id in zip(own, ids, strict=True)
        ]
    return [row for own in rows.values() for row in own]


def prompt_order(config: Config, prompts: PromptSet) -> PromptOrder | SourceOrder:
    """The order in which a run takes its prompts."""
    seed, per_step = config.train.seed, config.rollout.prompts_per_step
    sources = config.data.sources
    if len(sources) == 1:
        return PromptOrder(len(prompts), seed, per_step)
    counts = Counter(prompts.source_names())
    sizes = {name: counts[name] for name in map(source_name, sources)}
    return SourceOrder(sizes, [source.weight for source in sources], seed, per_step)


def load_prompts(
    config: Config, tokenizer: Tokenizer, architecture: Architecture, objective: SourceObjectives
) -> PromptSet:
    """The training prompts, with golden solutions if the run trains on them, now or once the guard
    raises lambda.
    """
    teacher, uses = load_teacher_prompt(config, tokenizer, objective), uses_of(objective)
    prompts = PromptSet(
        load_sources(config, teacher.columns if teacher else (), uses),
        tokenizer,
        config.data,
        window=architecture.max_positions,
        max_new_tokens=config.sampling.max_new_tokens if objective.needs_rollouts else 0,
        golden=golden_of(objective),
        teacher=teacher,
        uses=uses,
    )
    if config.rollout.prompts_per_step > len(prompts):
        raise UserError(
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} exceeds the "
            f"{len(prompts)} usable rows of data.train ({prompts.num_dropped} dropped), so a step "
            "would train on one prompt several times: lower it, or add rows"
        )
    prompt_order(config, prompts)
    return prompts


def load_held_out(
    config: Config, tokenizer: Tokenizer, architecture: Architecture
) -> PromptSet | None:
    """The held-out prompts; None without `data.eval`."""
    if config.data.eval is None:
        return None
    return held_out_prompts(configured_held_out(config), config, tokenizer, architecture)


def configured_held_out(config: Config) -> list[Row]:
    """The rows of `data.eval`, which the run's environment plays if it has one."""
    assert config.data.eval is not None
    has_environment = config.environment.function is not None
    with_columns = has_environment or config.reward.function is not None
    rows = held_out_rows(config.data.eval, with_columns)
    if not has_environment:
        return rows
    own = {"environment": OF_THE_RUN, "max_new_tokens": config.environment.own_budget}
    return [replace(row, **own) for row in rows]


def held_out_rows(source: SourceConfig, with_columns: bool = False) -> list[Row]:
    """The rows of `data.eval`, each problem of a file or data set once.

    A file with copies, as published for avg@k, would make intervals too narrow.
    """
    rows = load_rows(source, with_columns)
    if source.path.startswith(SYNTHETIC):  # its repetitions belong to the task
        return rows
    by_contents: dict[str, Row] = {}
    for row in rows:
        by_contents.setdefault(repr(replace(row, row_id="")), row)
    if repeated := len(rows) - len(by_contents):
        _log.warning(
            "%d of %d held-out rows repeat a problem; each problem is counted once "
            "(evaluation.num_samples=K samples K responses to each)",
            *(repeated, len(rows)),
        )
    return [*by_contents.values()]


def held_out_prompts(
    rows: Sequence[Row], config: Config, tokenizer: Tokenizer, architecture: Architecture
) -> PromptSet:
    """Rows as prompts that leave room for an evaluation's response."""
    tokenizer = tokenizer.with_template_kwargs(config.evaluation.chat_template_kwargs)
    return PromptSet(
        rows,
        tokenizer,
        config.data,
        window=architecture.max_positions,
        max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens,
        golden="none",
    )


def configured_architecture(model: ModelConfig) -> Architecture:
    """The inline architecture, or config.json's, with the model's `window` and `rope_theta`."""
    source = model.path if model.architecture is None else model.architecture
    assert source is not None, "the schema asks for one of the two"
    return read_architecture(source, window=model.window, rope_theta=model.rope_theta)


def refuse_small_vocabulary(
    path: str | None, architecture: Architecture, size: int, setting: str = "tokenizer.path"
) -> None:
    """Raise a UserError where the embedding has no row for the tokenizer's largest id, size-1."""
    if architecture.vocab_size < size:
        own = f"set {setting} to the model's own, or take another model"
        raise UserError(
            f"{path or 'the inline architecture'}: vocab_size={architecture.vocab_size} has no row "
            f"for the tokenizer's largest id, {size - 1}: {own if path else f'set it to {size}'}"
        )


def refuse_long_support(objective: SourceObjectives, vocab_size: int) -> None:
    """Raise a UserError where the objective reads more of the most probable tokens than exist."""
    for one in objective.each:
        if one.terms.on_support and one.top_k > vocab_size:
            raise UserError(
                f"objective.top_k={one.top_k} exceeds the tokenizer's {vocab_size} tokens: lower it"
            )


def refuse_unused_expert_ranks(config: Config, student: Architecture) -> None:
    """Raise a UserError where parallel.expert exceeds 1, and no model on these ranks has experts.

    Check a full run only. A cold start has the same ranks but no teacher.
    """
    teachers = [own for role, own in config.models_in_trainer.items() if role != "student"]
    models = [student, *map(configured_architecture, teachers)]
    if config.parallel.expert > 1 and all(model.experts is None for model in models):
        names = " and ".join(model.model_type for model in models)
        raise UserError(
            f"parallel.expert={config.parallel.expert}: {names} have no experts to distribute: set "
            "parallel.expert=1"
        )


def refuse_routing_without_experts(config: Config, student: Architecture) -> None:
    """Raise a UserError where rollout.routing_replay is set, and the student has no experts."""
    if config.rollout.routing_replay and student.experts is None:
        raise UserError(
            f"rollout.routing_replay=true: the student ({student.model_type}) has no experts "
            "whose choice could be replayed: set it to false"
        )


def refuse_prefixes_of_delta_nets(config: Config, student: Architecture) -> None:
    """Raise a UserError where train.share_prefixes is set, and a model has gated delta nets."""
    others = [own for role, own in config.models_in_trainer.items() if role != "student"]
    for model in (student, *map(configured_architecture, others)):
        if config.train.share_prefixes and model.delta_net is not None:
            raise UserError(
                f"train.share_prefixes=true: a gated delta net of this {model.model_type} model "
                "keeps one state for all tokens before, and needs whole sequences: set it to false"
            )


def refuse_missing_trackers(config: Config) -> None:
    """Raise a UserError where the metrics should go to a package that is not installed."""
    for package in _TRACKERS:
        if getattr(config.monitoring, package) and find_spec(package) is None:
            raise missing_tracker(package)


def missing_tracker(package: str) -> UserError:
    return UserError(
        f"the {package} package is not installed: pip install -e '.[trackers]', or set "
        f"monitoring.{package}={_TRACKERS[package]}"
    )
