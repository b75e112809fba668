"""An adapter of others, as PEFT saves it: what each tensor of this model becomes with it.

    with PeftAdapter(directory, architecture) as adapter:
        adapter.merged(name, tensor)

PEFT's own merge is the definition: W + scale · B A, in DoRA with rows of a trained length; biases,
rows of the embedding and whole modules are put in place of the model's. Any subset of the matrices
may have a pair. Names begin as the class that was trained names its layers; what is only a wrapper
(`base_model.model.`, `model.language_model.`, ...) is left out of the comparison.

transformers 5 holds the experts of a layer in stacks, and PEFT stacks their pairs, too. A is
[E R, I]: all rows of the first expert, then those of the next. B is [O, R E]: the first column of
every expert, then the second. The pairs of several stacks of one module are nested.

Letters: E experts, I inputs and O outputs of a matrix, R rank of its factors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.models.files.expert_stacks import Place, place
from stable_opd_mcore.models.files.peft_settings import CONFIG, WEIGHTS, read_settings
from stable_opd_mcore.models.tensors import HEAD, hf_shapes

_WRAPPERS = {"base_model", "model", "language_model", "module"}
_WRAPPED = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PART = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector"
    r"|token_adapter\.trainable_tokens_delta)(\..+)?"
)
_WHOLE = re.compile(r"\.(?:base_layer|modules_to_save(?:\.\w+(?=\.))?)(?=\.)")
_STACK = re.compile(r"(.+\.experts)((?:\.base_layer)*)")
_FOREIGN = {  # names of other programs, and what writes PEFT's
    r"\.unembed_tokens\.|\.experts\.w[123]\.": "tinker_cookbook.weights.build_lora_adapter",
    r"\.linear_(?:qkv|proj|fc1|fc2)\.": "Megatron-Bridge's export_adapter_ckpt",
    r"lora_(?:[ab]|down|up)\b": "the program that trained it (MLX, torchtune and Kohya name so)",
}
_EMBEDDING = "embed_tokens.weight"
_PEFTS = "base_model.model."  # before a module's name, which PEFT's patterns match
# The parameters of a module of stacked experts, in the order in which PEFT wraps them
_STACKS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


@dataclass(frozen=True)
class AdapterPair:
    """Where the file has the factors of one matrix."""

    a: str  # the names of the tensors
    b: str
    scale: float
    rank: int
    experts: int = 1  # whose factors the tensors stack
    expert: int = 0  # which of them this is
    rows: slice = field(default_factory=lambda: slice(None))  # the matrix's rows of B
    is_transposed: bool = False  # an embedding's, or a stack's by earlier releases of PEFT
    magnitude: str | None = None  # DoRA's lengths of the rows


def short_name(name: str) -> str:
    """A tensor's name without what depends on the class that holds the layers."""
    parts = name.split(".")
    while parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


class PeftAdapter:
    """The tensors of an adapter, by the model's.

    Args:
        base: what names the model, for errors.

    Raises:
        UserError: a file that is missing or not readable, settings whose merge is not defined, or
            a tensor without a place in the model.
    """

    def __init__(
        self,
        directory: Path,
        architecture: Architecture,
        base: str = f"base_model_name_or_path in {CONFIG}",
    ) -> None:
        self._remedy = f"set {base} to the model that the adapter was trained on"
        self.file, self._config_file = directory / WEIGHTS, directory / CONFIG
        self._architecture = architecture
        self._settings = read_settings(directory)
        self._targets = self._settings.get("target_parameters") or ()
        # The keys of all that follows are short names.
        self._shapes = {short_name(name): shape for name, shape in hf_shapes(architecture).items()}
        self._places: dict[str, dict[str, Place]] = {}  # stack -> matrix in it -> where
        for short in self._shapes if architecture.experts else ():
            if found := place(short, architecture, True):
                self._places.setdefault(found.stack, {})[short] = found
        self._stack_of = {short: stack for stack, each in self._places.items() for short in each}
        self.pairs: dict[str, AdapterPair] = {}
        self._biases: dict[str, tuple[str, float]] = {}  # added after a multiplication
        self._rows: dict[str, tuple[str, list[int]]] = {}  # of the embedding or head, replaced
        self._whole: dict[str, str] = {}  # replaced

    def __enter__(self) -> PeftAdapter:
        try:
            self._tensors = safe_open(self.file, framework="pt").__enter__()
            names: list[str] = self._tensors.keys()
        except (OSError, SafetensorError) as error:
            remedy = "copy or download it again"
            others = sorted(each.name for each in self.file.parent.glob("*.safetensors"))
            if not self.file.exists() and self.file.with_suffix(".bin").exists():
                remedy = "a pickle (.bin) is not read: load the adapter with PEFT and save it again"
            elif not self.file.exists() and others:
                remedy = f"there is {others[0]}, not of PEFT: write the adapter in PEFT's form"
            raise UserError(f"{self.file}: not readable: {error}; {remedy}") from error
        self._read = lru_cache(maxsize=4)(self._tensors.get_tensor)  # stacks, for many experts
        modules: dict[str, dict[str, str]] = {}  # module -> part of its change -> tensor
        for name in names:
            clean = _WRAPPED.sub("", name)
            if ".original_module." in clean:  # the base's own, next to what replaces it
                continue
            match = _PART.fullmatch(clean)
            if match is None:
                short = short_name(_WHOLE.sub("", clean))
                self._require_place(short, name)
                self._claim(self._whole, short, name)
                continue
            is_bias = match[2] == "lora_B" and (match[3] or "").endswith(".bias")
            part = "bias" if is_bias else match[2].rpartition(".")[2]
            self._claim(modules.setdefault(match[1], {}), part, name)
        for module, parts in modules.items():
            stack = _STACK.fullmatch(short_name(module))
            if stack is not None:
                self._place_stack(module, stack[1], stack[2].count(".base_layer"), parts)
            else:
                self._place_module(module, parts)
        if self._architecture.tied:
            self._fit_tied_head()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tensors.__exit__(*exception)

    def _claim(self, known: dict[str, str], key: str, name: str) -> None:
        if (other := known.setdefault(key, name)) != name:
            raise UserError(
                f"{self.file}: {other} and {name} are the same tensor of the model; save one "
                "adapter by itself with PEFT"
            )

    def _require_place(self, short: str, name: str) -> None:
        is_head = short == HEAD and self._architecture.tied
        if short in self._shapes or short in self._places or is_head or self._is_carried(short):
            return
        if writer := next((of for form, of in _FOREIGN.items() if re.search(form, name)), None):
            raise UserError(
                f"{self.file}: tensor {name} is not named as PEFT names it; write the adapter in "
                f"PEFT's form with {writer}"
            )
        if not re.search(r"\.\d+\.", name):  # in no layer
            raise UserError(
                f"{self.file}: tensor {name} is no part of a language model, but the head of "
                f"another task; if the rest is wanted, remove it from the file and from "
                f"modules_to_save in {CONFIG}"
            )
        a = self._architecture
        raise UserError(
            f"{self.file}: tensor {name} has no place in the model, which is {a.model_type} with "
            f"{a.num_layers} layers of {a.hidden_size}; {self._remedy}"
        )

    def _is_carried(self, short: str) -> bool:
        carried = tuple(map(short_name, self._architecture.carried))
        return bool(carried) and short.startswith(carried)

    def _place_module(self, module: str, parts: dict[str, str]) -> None:
        """Note what the parts of a module's change do to its weight and bias."""
        path = short_name(module)
        weight, some = f"{path}.weight", next(iter(parts.values()))
        self._require_place(weight, some)
        if tokens := parts.pop("trainable_tokens_delta", None):
            self._rows[weight] = tokens, self._token_ids(path.rpartition(".")[2])
            if not parts:
                return
        of_embedding = "lora_embedding_A" in parts
        # The factors of an embedding are those of the transposed matrix.
        keys = ("lora_embedding_B", "lora_embedding_A") if of_embedding else ("lora_A", "lora_B")
        a, b = self._factors_of(parts, *keys)
        magnitude = parts.get("lora_magnitude_vector")
        if magnitude and of_embedding:
            raise UserError(
                f"{self.file}: {magnitude}: DoRA of an embedding is not merged here; merge the "
                "adapter with PEFT (merge_and_unload), and give the merged model"
            )
        rank = self._shape(a)[1 if of_embedding else 0]
        inside = module.removeprefix(_PEFTS)
        key = f"{inside}.weight" if self._is_target(f"{inside}.weight") else inside
        scale = self._scale(key, a, rank)
        pair = AdapterPair(a, b, scale, rank, is_transposed=of_embedding, magnitude=magnitude)
        if (shape := self._shapes.get(weight)) is not None:
            self._require_shapes(weight, pair, *shape)
        self.pairs[weight] = pair
        if bias := parts.get("bias"):
            self._require_place(f"{path}.bias", bias)
            self._biases[f"{path}.bias"] = bias, scale

    def _factors_of(self, parts: dict[str, str], a: str, b: str) -> tuple[str, str]:
        """The names of a pair's tensors."""
        if not parts.keys() >= {a, b}:
            some, missing = next(iter(parts.values())), b if a in parts else a
            raise UserError(
                f"{self.file}: {some} stands without its {missing}; expected two factors: copy or "
                "download the file again"
            )
        return parts[a], parts[b]

    def _place_stack(self, module: str, experts: str, depth: int, parts: dict[str, str]) -> None:
        """Note the pairs of a stack. The outermost wrapper, of depth 0, has the last stack."""
        inside = module.removeprefix(_PEFTS).removesuffix(".base_layer" * depth)
        wrapped = [kind for kind in _STACKS if self._is_target(f"{inside}.{kind}")]
        some = next(iter(parts.values()))
        if depth >= len(wrapped):
            raise UserError(
                f"{self.file}: {some} changes stack {depth + 1} of these experts, and "
                f"target_parameters={sorted(self._targets)} of {CONFIG} names {len(wrapped)}; copy "
                "both files again"
            )
        kind = wrapped[-1 - depth]
        stack = f"{experts}.{kind}"
        if kind.endswith("_bias") or parts.keys() - {"lora_A", "lora_B"}:
            raise UserError(
                f"{self.file}: {some}: only pairs of factors of the weights of experts are merged "
                "here; merge the adapter with PEFT (merge_and_unload), and give the merged model"
            )
        a, b = self._factors_of(parts, "lora_A", "lora_B")
        self._require_place(stack, some)
        places = self._places[stack]
        number = len({found.expert for found in places.values()})
        rows = sum(self._shapes[short][0] for short in places) // number
        inputs = next(self._shapes[short][1] for short in places)
        is_old = self._shape(a)[1:] == (rows,) != (inputs,)  # as PEFT stacked them before
        rank = self._shape(a)[0] // number
        scale = self._scale(f"{inside}.{kind}", a, rank)
        pair = AdapterPair(a, b, scale, rank, experts=number, is_transposed=is_old)
        self._require_shapes(stack, pair, rows, inputs)
        for short, found in places.items():
            self.pairs[short] = replace(pair, expert=found.expert, rows=found.rows)

    def _is_target(self, parameter: str) -> bool:
        return any(parameter == each or parameter.endswith(f".{each}") for each in self._targets)

    def _token_ids(self, module: str) -> list[int]:
        given = self._settings.get("trainable_token_indices")
        if isinstance(given, dict):
            given = next((v for key, v in given.items() if key.rpartition(".")[2] == module), None)
        if not isinstance(given, list) or not all(type(each) is int for each in given):
            raise UserError(
                f"{self._config_file}: trainable_token_indices has no ids for {module}, of which "
                f"{self.file.name} holds rows; copy both again"
            )
        return given

    def _fit_tied_head(self) -> None:
        """Drop what repeats the embedding's change for a head that is the embedding; refuse what
        would make the two differ."""
        self._rows.pop(HEAD, None)  # PEFT ties them
        is_tying = self._settings.get("ensure_weight_tying") is True
        heads = self._whole.pop(HEAD, None), self.pairs.pop(HEAD, None)
        own = self._whole.get(_EMBEDDING), self.pairs.get(_EMBEDDING)
        if is_tying or not any((*heads, *own)):
            return
        if None not in (heads[0], own[0]) and not heads[1] and not own[1]:
            both = [self._tensors.get_tensor(str(name)) for name in (heads[0], own[0])]
            if torch.equal(*both):
                return
        raise UserError(
            f"{self.file}: it changes the embedding or the head by itself, but they are one tensor "
            "in the base model (tie_word_embeddings=true); merge the adapter with PEFT "
            "(merge_and_unload) into a model whose config.json says false, and give that"
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors.get_slice(name).get_shape())

    def _require_shapes(self, short: str, pair: AdapterPair, rows: int, inputs: int) -> None:
        """Raise a UserError if the file's factors are not those of a matrix [rows, inputs]."""
        ranks = pair.rank * pair.experts
        a, b = (ranks, inputs), (rows, ranks)
        if pair.is_transposed:
            a, b = (a[::-1], b[::-1]) if pair.experts == 1 else (b[::-1], a[::-1])
        for name, shape in {pair.a: a, pair.b: b}.items():
            self._require_shape(short, name, self._shape(name), shape)

    def _require_shape(
        self, short: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]
    ) -> None:
        """Raise a UserError for a tensor of another shape than that of the model's tensor."""
        found, wanted, remedy = tuple(found), tuple(wanted), self._remedy
        if found == wanted:
            return
        differ = [pair for pair in zip(found, wanted, strict=False) if pair[0] != pair[1]]
        rows = self._shapes[_EMBEDDING][0]
        if short in (_EMBEDDING, HEAD) and [own for _, own in differ] == [rows]:
            remedy = (
                "the vocabulary was resized in training: resize the base model's with "
                f"resize_token_embeddings({differ[0][0]}), save it with the adapter's tokenizer, "
                f"and {self._remedy}"
            )
        raise UserError(
            f"{self.file}: tensor {name} has shape {found}, expected {wanted}; {remedy}"
        )

    def _scale(self, key: str, a: str, found: int) -> float:
        """PEFT's scale of a module's product, by rank_pattern and alpha_pattern. `found` is the
        rank of its tensor a."""
        settings = self._settings
        rank = _by_pattern(settings.get("rank_pattern"), key, settings["r"])
        if rank != found:
            raise UserError(
                f"{self._config_file}: r={rank} for {key}, but {a} in {self.file.name} has rank "
                f"{found}; copy both files again"
            )
        alpha = _by_pattern(settings.get("alpha_pattern"), key, settings["lora_alpha"])
        return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    def factors(self, short: str) -> tuple[Tensor, Tensor]:
        """A [R, I] and B [O, R] of a matrix that has a pair."""
        pair = self.pairs[short]
        a, b = self._read(pair.a), self._read(pair.b)
        if pair.experts > 1:
            a = a.unflatten(0, (pair.experts, -1))[pair.expert]
            b = b.unflatten(1, (-1, pair.experts))[..., pair.expert]
            a, b = (b.t(), a.t()) if pair.is_transposed else (a, b)
        elif pair.is_transposed:
            a, b = a.t(), b.t()
        return a, b[pair.rows]

    def changes(self, name: str) -> bool:
        """Whether the adapter changes the model's tensor of this name."""
        short = short_name(name)
        own = (self.pairs, self._rows, self._biases, self._whole)
        return any(short in each for each in own) or self._stack_of.get(short) in self._whole

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The model's tensor with all changes, in its type, summed in fp32."""
        short, merged = short_name(name), weight
        if (whole := self._whole_of(short)) is not None:
            name = self._whole.get(short) or self._whole[self._stack_of[short]]
            self._require_shape(short, name, whole.shape, weight.shape)
            merged = whole.to(weight.device)
        if (rows := self._rows.get(short)) is not None:
            values = self._tensors.get_tensor(rows[0]).to(weight)
            merged = merged.to(weight.dtype, copy=True)
            merged[torch.tensor(rows[1], device=weight.device)] = values
        if (bias := self._biases.get(short)) is not None:
            merged = merged + bias[1] * self._tensors.get_tensor(bias[0]).float().to(weight.device)
        if (pair := self.pairs.get(short)) is not None:
            a_RI, b_OR = (each.to(weight.device).float() for each in self.factors(short))
            merged = (pair.scale * (b_OR @ a_RI)).add_(merged)
            if pair.magnitude is not None:
                lengths_O = self._tensors.get_tensor(pair.magnitude).flatten().to(merged)
                merged *= (lengths_O / merged.norm(dim=1)).unsqueeze(1)
        return merged.to(weight.dtype)

    def _whole_of(self, short: str) -> Tensor | None:
        """What replaces a tensor of the model, from the file or from a stack there."""
        if short in self._whole:
            return self._tensors.get_tensor(self._whole[short])
        stack = self._stack_of.get(short)
        if stack not in self._whole:
            return None
        return self._places[stack][short].of(self._read(self._whole[stack]))

    def changes_carried(self, names: Collection[str]) -> bool:
        """Whether the adapter changes other parts of the model than its decoder. A UserError
        refuses a change of one that is not among `names`."""
        changed = set(filter(self._is_carried, (*self.pairs, *self._whole, *self._biases)))
        for short in sorted(changed - set(map(short_name, names))):
            raise UserError(
                f"{self.file}: it changes {short}, which the base model does not have; "
                + self._remedy
            )
        return bool(changed)

    def other_changes(self) -> list[str]:
        """Tensors of the file other than plain pairs for the decoder's layers."""
        found = [*self._whole.values()]
        found += [name for name, _ in (*self._biases.values(), *self._rows.values())]
        found += [pair.magnitude for pair in self.pairs.values() if pair.magnitude is not None]
        return found + [
            pair.a
            for short, pair in self.pairs.items()
            if not short.startswith("layers.") or short not in self._shapes
        ]


def _by_pattern(patterns: Any, key: str, default: float) -> float:
    """PEFT's get_pattern_key: the first pattern that matches the end of the name counts."""
    each = (patterns or {}).items()
    return next((value for one, value in each if re.match(rf"(.*\.)?({one})$", key)), default)
