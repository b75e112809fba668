"""The base of every section of the settings: frozen, typed, unknown keys are errors.

The text under a field is its description; docs/configuration.md is generated from it.
"""

import re
from typing import Annotated, Any, cast, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

_LARGEST = 10**9
_LARGEST_SEED = 2**63 - 1


def _is_url(value: str) -> str:
    try:
        address = urlsplit(value)
        is_address = bool(address.hostname and address.hostname.encode("idna"))
        is_address = is_address and address.port != 0  # raises a ValueError for one that is none
    except ValueError:
        is_address = False
    if not is_address or not re.fullmatch(r"https?://[^/\s?#@]+(/[^\s?#]*)?", value):
        raise ValueError(f"{value!r} is not a server's address; expected http://HOST:PORT")
    if value.rstrip("/").endswith("/v1"):
        raise ValueError(f"{value!r} is OpenAI's interface of a server; leave out /v1")
    return value


def _distinct(urls: tuple[str, ...]) -> tuple[str, ...]:
    servers = [url.rstrip("/") for url in urls]
    if len({*servers}) < len(servers):
        raise ValueError(f"{[*urls]} names a server twice; give each once")
    return urls


Url = Annotated[str, AfterValidator(_is_url)]
Urls = Annotated[tuple[Url, ...], AfterValidator(_distinct)]


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of: {int, None} of `tuple[int, ...] | None`."""
    parts = get_args(annotation)
    return {annotation} if not parts else {kind for part in parts for kind in _kinds(part)}


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `yes` where a number is expected: pydantic would read it as 1."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation)
        values = cast("list[Any]", value) if isinstance(value, list) else [value]
        if (
            kinds & {int, float}
            and not kinds & {bool, Any}
            and any(type(each) is bool for each in values)
        ):
            raise ValueError(f"{value!r} is true or false; expected a number")
        return cast("Any", value)

    @field_validator("*")
    @classmethod
    def _not_absurd(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse an absurdly large number here, before it fails as missing memory."""
        name = info.field_name or ""
        largest = _LARGEST_SEED if name == "seed" else _LARGEST
        counts = type(value) is int or name.endswith("_minutes")
        if counts and value is not None and value > largest:
            raise ValueError(f"{value:.6g} is too large; set at most {largest:.6g}")
        return value
