"""What the files of a student and of its teacher say, without their weights.

    model = read_model("student", "models/student")

Not here: the models of a config (run_inputs.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.stop_ids import stop_sources
from stable_opd_mcore.data.vocabulary import RenamedToken, same_vocabulary
from stable_opd_mcore.models.description.config_fields import decoder_settings, read_fields

EXAMPLE = "1+1"  # a problem that the synthetic tokenizer can encode too


@dataclass(frozen=True)
class ModelFiles:
    """One model's tokenizer and settings."""

    role: str  # "student" or "teacher"
    place: str  # its directory, as messages name it
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    stop_sources: Mapping[str, tuple[int, ...]]  # source -> the ids that it names
    settings: Mapping[str, Any]  # config.json, or the inline architecture; empty without
    prompt_template: str = "{problem}"
    system_prompt: str | None = None

    def prompt_of(self, problem: str) -> str:
        """A problem's prompt, by this model's own template."""
        return self.tokenizer.render_prompt(problem, self.prompt_template, self.system_prompt)

    @cached_property
    def prompt_text(self) -> str:
        """`prompt_of` an example."""
        return self.prompt_of(EXAMPLE)

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(self.prompt_text))

    def named(self, token_id: int | None) -> str:
        """An id with its name in this model: "151645 '<|im_end|>'"."""
        if token_id is None:
            return "none"
        name = self.tokenizer.names_by_id.get(token_id)
        return f"{token_id} (no token)" if name is None else f"{token_id} {name!r}"

    def named_all(self, token_ids: tuple[int, ...]) -> str:
        return ", ".join(map(self.named, token_ids)) or "none"


@dataclass(frozen=True)
class Pair:
    """A student and the teacher that scores it."""

    student: ModelFiles
    teacher: ModelFiles | None  # None: the objective has none
    merged_stops: tuple[int, ...]  # one outcome in the loss; empty: it compares single tokens
    teacher_gap: str | None = None  # what is not known of the teacher, and why
    has_own_prompt: bool = False  # the teacher: teacher.prompt

    @property
    def models(self) -> tuple[ModelFiles, ...]:
        return (self.student,) if self.teacher is None else (self.student, self.teacher)

    @property
    def has_two_tokenizers(self) -> bool:
        return self.teacher is not None and self.teacher.tokenizer is not self.student.tokenizer

    @property
    def models_with_own_tokenizer(self) -> tuple[ModelFiles, ...]:
        return self.models if self.has_two_tokenizers else (self.student,)

    @cached_property
    def renamed(self) -> list[RenamedToken]:
        """Added tokens that differ."""
        if self.teacher is None:
            return []
        return same_vocabulary(self.student.tokenizer, self.teacher.tokenizer)


def read_model(role: str, path: str) -> ModelFiles:
    """A model directory; one without config.json has no settings."""
    tokenizer = Tokenizer.load(path)
    settings = read_fields(path)[1] if (Path(path) / "config.json").is_file() else {}
    return ModelFiles(
        role=role,
        place=path,
        tokenizer=tokenizer,
        stop_ids=tokenizer.stop_token_ids,
        stop_sources=stop_sources(path, tokenizer),
        settings=decoder_settings(settings),
    )
