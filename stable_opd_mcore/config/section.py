"""The base of every section of the settings: frozen, typed, unknown keys are errors.

The text under a field is its description; docs/configuration.md is generated from it.
"""

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

_LARGEST = 10**9
_LARGEST_SEED = 2**63 - 1


def _is_url(value: str) -> str:
    try:
        address = urlsplit(value)
        is_address = bool(address.hostname and address.hostname.encode("idna"))
        _ = address.port  # raises a ValueError for one that is none
    except ValueError:
        is_address = False
    if not is_address or not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
        raise ValueError(f"{value!r} is not a server's address; expected http://HOST:PORT")
    return value


Url = Annotated[str, AfterValidator(_is_url)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

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
