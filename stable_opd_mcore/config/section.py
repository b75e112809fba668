"""The base of every section of the settings: frozen, typed, unknown keys are errors.

The text under a field is its description; docs/configuration.md is generated from it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        populate_by_name=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
