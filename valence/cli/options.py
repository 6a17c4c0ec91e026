"""Options of a command as a dataclass, which the function below the command takes as well."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter of a command whose annotation is a dataclass by the fields of the
    dataclass.

    The annotations of the fields are those of typer, such as ``Annotated[int,
    typer.Option(help="Maximum tokens per answer.")]``.
    """
    hints = get_type_hints(command, include_extras=True)
    classes: dict[str, Any] = {
        name: hint for name, hint in hints.items() if is_dataclass(hint) and name != "return"
    }
    parameters: list[Parameter] = []
    for parameter in signature(command).parameters.values():
        if parameter.name not in classes:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        options = classes[parameter.name]
        types = get_type_hints(options, include_extras=True)
        parameters += [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=_default(field),
                annotation=types[field.name],
            )
            for field in fields(options)
        ]
    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in parameters]

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, options in classes.items():
            values[name] = options(**{f.name: values.pop(f.name) for f in fields(options)})
        return command(**values)

    run.__dict__["__signature__"] = Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default
