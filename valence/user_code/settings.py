"""The settings of functions: types and bounds from annotations, meanings from docstrings."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails

from valence.user_code.attempt import Raised, attempt
from valence.user_code.sources import unwrap


def settings_model(
    name: str,
    parameters: Iterable[inspect.Parameter],
    meanings: Mapping[str, str],
    *,
    validate_default: bool = False,
    module: str = __name__,
) -> type[BaseModel]:
    """The settings of functions as a model: a field with type, bounds, default and meaning for each
    of these parameters.

    Bounds are those of ``annotated_types``: ``Annotated[float, Gt(0)]``. module: in which
    annotations that are text are evaluated.
    """
    fields: dict[str, Any] = {
        p.name: (
            p.annotation,
            Field(... if p.default is p.empty else p.default, description=meanings.get(p.name)),
        )
        for p in parameters
    }
    config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_default=validate_default,
    )
    with warnings.catch_warnings():
        # a setting may be called schema
        warnings.filterwarnings("ignore", ".*shadows an attribute")
        return create_model(name, __config__=config, __module__=module, **fields)


def setting_docs(doc: str) -> dict[str, str]:
    """Descriptions of a function's settings: the lines ``name: text`` that end its docstring."""
    tail = doc.rstrip().rsplit("\n\n", 1)[-1]
    matches = re.findall(r"^ *([a-z]\w*): (.+(?:\n {8,}.+)*)", tail, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in matches}


def annotation_error(
    fn: Callable[..., Any], parameter: inspect.Parameter, value: object
) -> ErrorDetails | None:
    """Why a value of a recipe does not fit the annotation of a parameter, as pydantic's error.

    None if it fits, or if the annotation is not one that JSON values can be compared with, such as
    a name that only type checkers import.
    """
    if parameter.annotation is parameter.empty or (value is None and parameter.default is None):
        return None

    def validate() -> None:
        module = str(unwrap(fn).__module__)
        model = settings_model("settings", [parameter], {}, module=module)
        # as JSON, in which a list is also a tuple
        model.model_validate_json(json.dumps({parameter.name: value}))

    result = attempt(validate)
    if isinstance(result, Raised) and isinstance(result.error, ValidationError):
        return result.error.errors()[0]
    return None
