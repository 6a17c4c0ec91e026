"""The table of methods: what a run is called, the loss it trains with, and the settings that follow from that loss."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from valence.errors import UserError
from valence.losses import LOSSES, Loss
from valence.types import Kind


@dataclass(frozen=True)
class Method:
    """A way to train: a name, and the row of the loss table it uses."""

    name: str
    loss: Loss

    @property
    def kind(self) -> Kind:
        """What one row of its data is."""
        return self.loss.data

    @property
    def needs_reference(self) -> bool:
        return self.loss.needs_reference

    @property
    def of_scores(self) -> bool:
        return self.loss.of_scores

    @property
    def mismatches(self) -> bool:
        """Does a step also measure completions behind prompts that they do not answer (for z0)?"""
        return self.loss.statistic is not None

    def without_effect(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return self.loss.without_effect(settings)

    def contradictions(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        return self.loss.contradictions(settings)

    @cached_property
    def settings(self) -> type[BaseModel]:
        """The ``loss`` section of a recipe, derived from the signatures: types, bounds, defaults and what each means."""
        meanings = {k: v for fn in self.loss.functions for k, v in setting_docs(fn.__doc__ or "").items()}
        fields: dict[str, Any] = {
            name: (p.annotation, Field(default=p.default, description=meanings.get(name)))
            for name, p in self.loss.settings.items()
        }
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        return create_model(f"{self.name}_loss", __config__=config, **fields)

    def resolve(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The given settings checked, with the defaults filled in. Raises pydantic.ValidationError."""
        return self.settings(**settings).model_dump()


def setting_docs(doc: str) -> dict[str, str]:
    """Meanings of a function's settings: the lines ``name: meaning`` at the end of its docstring."""
    tail = doc.rstrip().rsplit("\n\n", 1)[-1]
    found = re.findall(r"^ *([a-z]\w*): (.+(?:\n {8,}.+)*)", tail, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


METHODS: dict[str, Method] = {name: Method(name, loss) for name, loss in LOSSES.items()}


def method_of(name: str) -> Method:
    """The row of a method or loss. Raises UserError with the nearest names."""
    if name in METHODS:
        return METHODS[name]
    near = get_close_matches(str(name), METHODS, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UserError(f"there is no method {name!r}", where="method", fix=f"{hint}methods: {', '.join(METHODS)}")
