"""Settings of the models: student, teacher, reference, tokenizer. Loads without torch."""

import math
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from stable_opd_mcore.config.section import Section, Url
from stable_opd_mcore.host.hub import COMMIT
from stable_opd_mcore.host.user_code import UserFunction, read_user_function


class ModelConfig(Section):
    """A model directory, or an inline architecture with random weights."""

    path: str | None = None
    """Directory with config.json and weights: safetensors, or a Megatron distributed checkpoint. Or
    a hub id (`Qwen/Qwen2.5-Math-7B`) with `revision`, which is downloaded where there is a
    network."""
    revision: str | None = Field(default=None, pattern=f"^{COMMIT}$")
    """The commit of a hub id in `path`, 40 hex digits. No code of it is run."""
    architecture: dict[str, Any] | None = None
    """The fields of a config.json, inline. The weights are random and follow from `train.seed`."""
    window: PositiveInt | None = None
    """Positions that the model takes, in place of config.json's `max_position_embeddings`. The
    trained model's config.json has it too. `null`: as in config.json."""
    rope_theta: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Base of the rotary embedding, in place of config.json's `rope_theta`. The trained model's
    config.json has it too. `null`: as in config.json."""
    stop_token_ids: tuple[int, ...] | None = None
    """Token ids that end a response; the first one ends golden solutions. `null`: the token that
    ends a turn in the chat template, then the `eos_token_id` of generation_config.json, config.json
    and tokenizer. A run that starts from the trained model needs the list again."""

    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template, such as `enable_thinking: false`. One that the template never
    reads is refused. The student's render the student's prompts."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.architecture is not None:
            raise ValueError("path and architecture are both set; drop one of them")
        if self.stop_token_ids == ():
            raise ValueError(
                "stop_token_ids is an empty list, so no token would end a response; list at least "
                "one, or set it to null for those of the model's files"
            )
        return self


class LoraConfig(Section):
    """Low-rank factors (LoRA): docs/lora.md. `{}` takes the defaults."""

    rank: PositiveInt = 32
    """Rank of the two factors of a matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """The product of the factors is multiplied by alpha / rank before it is added to the matrix."""
    rslora: bool = False
    """Divide alpha by the root of the rank instead."""
    expert_rank: PositiveInt | None = None
    """Rank of the factors of experts' matrices, whose product is multiplied by alpha / expert_rank.
    `null`: `rank`."""
    matrices: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Only matrices with these ends of names: `[q_proj, experts.down_proj]`. `null`: all."""
    path: str | None = None
    """Directory of an adapter that PEFT has saved, to start from; the settings above must be its.
    `null`: new factors, which change nothing before the first update."""

    def rank_of(self, is_expert: bool) -> int:
        """Rank of the factors of an expert's matrix, or of any other."""
        return (self.expert_rank or self.rank) if is_expert else self.rank

    def scale(self, rank: int) -> float:
        """What the product of factors of this rank is multiplied by."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


class StudentConfig(ModelConfig):
    """The model that is trained."""

    lora: LoraConfig | None = None
    """Train only a pair of low-rank factors for each matrix of attention, MLPs, experts and gated
    delta nets; all other weights are frozen. `null`: all weights are trained."""


class NamedTeacher(ModelConfig):
    """One of several teachers: a model of its own, or the section's with an adapter."""

    adapter: str | None = None
    """Directory of an adapter that PEFT has saved, in place of `path`: the teacher is the model of
    `teacher.path` with its factors, which are all the memory that it takes."""


class PromptFunction(Section):
    """A function of the user's own that makes the teacher's prompt of a rollout after it has ended:
    docs/teacher_prompt.md."""

    function: str
    """`path/to/file.py:function`, relative to the working directory. It is called with the row as a
    dict of its columns, the rollout, and the other rollouts of its prompt. It returns a text,
    messages, or `None`: then no teacher scores the rollout."""

    @model_validator(mode="after")
    def _own_function(self) -> Self:
        self.read()
        return self

    def read(self) -> UserFunction:
        """The function."""
        return read_user_function(self.function, ("row", "rollout", "others"))


# What says of a teacher which model it is
_FILES = ("path", "revision", "architecture", "window", "rope_theta", "stop_token_ids")
SELF = "self"  # teacher.path of a student that is its own teacher


class TeacherConfig(ModelConfig):
    """The teacher: a model in the trainer, the student itself (`path: self`), or SGLang servers.
    Objectives without a teacher ignore the section, so that runs of one comparison can share it."""

    weights: Literal["frozen", "ema", "live"] = "frozen"
    """With `path: self`. `frozen`: the student's at the start of the run. `ema`: an fp32 average
    that moves towards the student after every step. `live`: the student's present ones, without a
    gradient."""
    ema_decay: float = Field(default=0.999, gt=0, lt=1)
    """With `weights: ema`: the share of the teacher that a step keeps."""
    prompt: str | PromptFunction | None = None
    """The teacher's own prompt: a Jinja template of the user's message over the columns of a row
    (`{{ problem }}`, `{{ solution }}`), which the teacher's chat template then renders; or a
    `function`, which also reads what happened in the rollout (docs/teacher_prompt.md). `null`: the
    teacher reads the student's prompt."""
    engine: Literal["megatron", "sglang"] = "megatron"
    """`megatron`: the teacher runs in the trainer, on the trainer's ranks. `sglang`: servers score
    the rollouts over HTTP, at temperature 1; with `rollout.engine: sglang` each as soon as it is
    finished."""
    urls: tuple[Url, ...] = ()
    """With `engine: sglang`: the addresses of the replicas of one teacher."""
    routes: dict[str, tuple[Url, ...]] = Field(default={})
    """With `engine: sglang`: several teachers. Maps the source of a prompt (its prompt_id before
    the last colon) to the addresses of that teacher's replicas."""
    api_key_file: str | None = None
    """File with the servers' API key; `null`: the servers have none."""
    verify: Literal["refuse", "warn", "skip"] = "refuse"
    """With `engine: sglang`, `urls`, and weights in `path`: the scores of a few prompts by the
    servers are compared at the start with those that these weights give, computed on the CPUs of
    the first machine. `refuse` and `warn`: what follows from a difference. `skip`: nothing is
    compared."""
    models: dict[str, NamedTeacher] = Field(default={})
    """With `engine: megatron`: more teachers, of the sources that name them in
    `data.train[].teacher`; this section's own model teaches the others. Models wait in host memory
    and take turns on the GPUs. In place of a model's keys, `adapter: DIRECTORY` names what PEFT has
    saved for this section's own model."""

    def named(self, name: str | None) -> Self:
        """The section with this one of `models` as the only teacher; None: with its own model."""
        own = self if name is None else self.models[name]
        if name in self.adapters:
            files = {"stop_token_ids": own.stop_token_ids or self.stop_token_ids}
        else:
            files = {key: getattr(own, key) for key in _FILES}
        return self.model_copy(update={**files, "models": {}})

    @property
    def in_turn(self) -> bool:
        """Whether several models take turns on the GPUs."""
        return any(model.adapter is None for model in self.models.values())

    @property
    def adapters(self) -> dict[str, Path]:
        """The directories of those of `models` that are adapters."""
        models = self.models.items()
        return {name: Path(model.adapter) for name, model in models if model.adapter}

    @property
    def prompt_function(self) -> PromptFunction | None:
        """What makes a prompt of each rollout; None: `prompt` is a template, or none."""
        return self.prompt if isinstance(self.prompt, PromptFunction) else None

    @property
    def is_self(self) -> bool:
        """Whether the student is its own teacher."""
        return self.path == SELF

    @property
    def is_served(self) -> bool:
        """Whether SGLang servers hold the teacher."""
        return self.engine == "sglang"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        others = {"engine": "megatron", "revision": None, "window": None, "rope_theta": None}
        if self.is_self:
            for key, default in others.items():
                if getattr(self, key) != default:
                    raise ValueError(
                        f"teacher.{key}={getattr(self, key)} with teacher.path=self: the teacher "
                        f"is the student in the trainer; drop teacher.{key}"
                    )
        elif self.weights != "frozen":
            raise ValueError(
                f"teacher.weights={self.weights} with teacher.path={self.path}: only a "
                "teacher that is the student has such weights; drop it, or set teacher.path=self"
            )
        if self.weights == "live" and self.prompt is None:
            raise ValueError(
                "teacher.path=self with teacher.weights=live and no teacher.prompt: the teacher is "
                "the student with the same prompt, so there is nothing to learn; set "
                "teacher.prompt, or teacher.weights=frozen"
            )
        if self.is_served != bool(self.urls or self.routes):
            raise ValueError(
                f"teacher.engine={self.engine} with teacher.urls={list(self.urls)} and "
                f"teacher.routes={self.routes}: sglang needs one of them, and only sglang reads "
                "them; set teacher.engine=sglang and one of them, or neither"
            )
        if self.urls and self.routes:
            raise ValueError("teacher.urls (one teacher) and teacher.routes (several): drop one")
        return self

    @model_validator(mode="after")
    def _models_in_trainer(self) -> Self:
        if self.models and (self.is_self or self.is_served):
            raise ValueError(
                f"teacher.models with teacher.path={self.path} and teacher.engine={self.engine}: "
                "they take turns with a model in the trainer that is not the student; set "
                "teacher.path to one, or teacher.routes for several served teachers"
            )
        for name, model in self.models.items():
            if [model.path, model.architecture, model.adapter].count(None) != 2:
                raise ValueError(
                    f"teacher.models.{name} needs a path, an architecture or an adapter; set one"
                )
            if model.adapter and (model.window or model.rope_theta):
                raise ValueError(
                    f"teacher.models.{name} has an adapter, so its window and rope_theta are those "
                    "of teacher; drop them there"
                )
            if model.chat_template_kwargs:
                raise ValueError(
                    f"teacher.models.{name} has chat_template_kwargs, but those of teacher count "
                    "for all its models; drop them"
                )
        return self

    @model_validator(mode="after")
    def _served(self) -> Self:
        if self.verify != "refuse" and not (self.urls and self.path):
            raise ValueError(
                f"teacher.verify={self.verify} with teacher.urls={list(self.urls)} and "
                f"teacher.path={self.path}: only servers are compared, with weights in path; drop "
                "it, or set both"
            )
        if self.is_served and (self.window or self.rope_theta):
            raise ValueError(
                "teacher.window or teacher.rope_theta with teacher.engine=sglang: only a teacher "
                "in the trainer reads them; set them in config.json of the servers' model instead"
            )
        return self


class ReferenceConfig(Section):
    """The reference model of the KL term, which no gradient changes."""

    path: str | None = None
    """Directory with weights of the student's architecture. `null`: the student's weights at the
    start of the run."""
    update: Literal["never", "every", "ema"] = "never"
    """`every`: after every `every` steps the student's weights become the reference. `ema`: after
    every step the reference moves towards the student; it is an fp32 average of its weights."""
    every: PositiveInt = 100
    """With `update: every`: steps between two updates."""
    decay: float = Field(default=0.999, gt=0, lt=1)
    """With `update: ema`: the share of the reference that a step keeps."""


class TokenizerConfig(Section):
    """The student's tokenizer."""

    path: str | None = None
    """Directory with tokenizer.json, or `synthetic` for the characters of the arithmetic task.
    `null`: `student.path`."""
