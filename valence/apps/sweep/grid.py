"""The settings and values that a sweep tries: ``--over`` read, checked, and expanded.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valence.config.grids import recommended_grid
from valence.config.load import LoadedRecipe, load_recipe
from valence.config.needs import method_in
from valence.config.parse import from_mapping, override
from valence.errors import UserError
from valence.methods import Method, method_of

RECOMMENDED = "recommended"
"""The word that stands for the recommended grid of the method."""

SHORT_NAMES = {"learning_rate": "lr"}
"""Names of settings in the names of trials, where they are not the last part of the setting."""

OF_THE_RECIPE = "recipe"
"""Stands for the recipe's value of a section or a list, such as ``data.train``."""

FIXED = {
    "run": "it decides where and how often a run is saved, not what is trained",
    "eval": "it decides what is measured, and trials are compared by the same measure",
    "data.eval": "trials are compared on the same held-out rows",
    "data.eval_seed": "trials are compared on the same held-out rows",
    "data.test": "trials are compared on the same test rows",
    "reference.cache": "all trials of a sweep share one cache",
    "train.seed": "seeds measure the noise, and are not chosen by their result",
}
"""Settings and sections that a sweep cannot vary, and why."""

HELD_OUT_FROM = dict.fromkeys(
    ("data.train", "data.limit"), "data.eval holds out a share of these rows"
)
"""Further settings that a sweep cannot vary if ``data.eval`` is a share, and why."""

MAX_NAME = 150
"""Longest name of a trial in bytes, without its seed."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"\s*({NUMBER}):({NUMBER})(?::(\w+))?\s*")


@dataclass(frozen=True, slots=True)
class ValueRange:
    """A range of numbers to search. is_log: on a logarithmic scale. is_integer: whole numbers."""

    low: float
    high: float
    is_log: bool
    is_integer: bool


Axis = tuple[Any, ...] | ValueRange
"""The values of one setting: a list, or a range to search."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """Values of the settings of a sweep, without a seed.

    values: by setting, as the recipe resolves them. overrides: ``key=value`` words that set them.
    is_default: whether these are the values of the recipe itself. shares_cache: whether its runs
    read the sweep's reference cache.
    """

    values: Mapping[str, Any]
    overrides: tuple[str, ...]
    is_default: bool
    shares_cache: bool

    @property
    def label(self) -> str:
        """The values with short names, as ``beta=0.1,lr=1e-06``."""
        return label_of(self.values)


class Grid:
    """The settings that a sweep varies, on top of a recipe with fixed overrides.

    axes: values by setting. default: the configuration of the recipe's values.
    """

    def __init__(self, recipe: Path, overrides: Sequence[str], over: Sequence[str]) -> None:
        """Read and check ``--over``. Raises UserError for mistakes in it or in the recipe."""
        self.recipe, self.overrides = recipe, tuple(overrides)
        self.base = load(recipe, overrides)
        self.axes = _read_axes(over, self.base)
        self.default = self.configuration({})

    def configuration(self, raw: Mapping[str, Any]) -> Configuration:
        """The configuration with these values, as they are written; that of the recipe for settings
        that are left out. Raises UserError with every mistake.
        """
        overrides = tuple(f"{name}={json.dumps(value)}" for name, value in raw.items())
        loaded = load(self.recipe, [*self.overrides, *overrides]) if raw else self.base
        values, defaults = (
            {
                name: source.settings[name].value
                if name in source.settings
                else written.get(name, OF_THE_RECIPE)
                for name in self.axes
            }
            for source, written in ((loaded, raw), (self.base, dict[str, Any]()))
        )
        return Configuration(values, overrides, key_of(values) == key_of(defaults), _caches(loaded))

    def expand(self) -> list[Configuration]:
        """Every combination of the values, the last setting varying fastest.

        Raises UserError for a range, and for values that are the same once they are resolved.
        """
        for name, axis in self.axes.items():
            if isinstance(axis, ValueRange):
                raise UserError(
                    "a range needs a search, because a grid tries every value",
                    code="sweep-range",
                    where=f"--over {name}",
                    fix="list values separated by commas, or add --search optuna",
                )
        lists = [axis for axis in self.axes.values() if not isinstance(axis, ValueRange)]
        configurations = [
            self.configuration(dict(zip(self.axes, combination, strict=True)))
            for combination in itertools.product(*lists)
        ]
        for key, count in Counter(key_of(c.values) for c in configurations).items():
            if count > 1:
                raise UserError(
                    f"the same value is listed more than once: {label_of(json.loads(key))}",
                    code="sweep-value-duplicate",
                    where="--over",
                    fix="list each value once",
                )
        return configurations


def load(recipe: Path, overrides: Sequence[str]) -> LoadedRecipe:
    return load_recipe(recipe, overrides)


def _caches(loaded: LoadedRecipe) -> bool:
    """Whether a run of the recipe can read reference log-probabilities from the sweep's cache."""
    recipe = loaded.recipe
    methods: list[Method] = [method_in(recipe), *(method_of(part.method) for part in recipe.mix)]
    return (
        recipe.reference.cache == "auto"
        and recipe.reference.sync_every is None
        and not methods[0].online
        and any(method.needs_reference for method in methods)
    )


# --over


def _read_axes(over: Sequence[str], base: LoadedRecipe) -> dict[str, Axis]:
    axes: dict[str, Axis] = {}
    for word in over:
        for name, axis in _read_word(word, base).items():
            if name in axes:
                raise UserError(
                    f"{name} is listed twice",
                    code="sweep-setting-duplicate",
                    where="--over",
                    fix=f"list all of its values once: {name}=VALUE,VALUE",
                )
            axes[name] = axis
    if not axes:
        raise UserError(
            "there is nothing to vary",
            code="sweep-empty",
            where="--over",
            fix="name a setting and its values: --over loss.beta=0.03,0.1,0.3, or --over "
            f"{RECOMMENDED}",
        )
    return axes


def _read_word(word: str, base: LoadedRecipe) -> dict[str, Axis]:
    """The settings and values of one word after ``--over``."""
    if word == RECOMMENDED:
        recipe, method = base.recipe, method_in(base.recipe)
        grid = recommended_grid(
            method.name, method.online, method.learning_rates, recipe.trains_adapter
        )
        if recipe.train.max_steps is not None:
            grid.pop("train.epochs", None)
        return dict(grid)
    name, equals, text = (part.strip() for part in word.partition("="))
    if not equals or not name:
        raise UserError(
            f"cannot read {word!r}",
            code="sweep-over-syntax",
            where="--over",
            fix=f"write setting=VALUE,VALUE, such as loss.beta=0.03,0.1,0.3, or {RECOMMENDED}",
        )
    fixed_here = FIXED | (HELD_OUT_FROM if base.recipe.data.split else {})
    for fixed, reason in fixed_here.items():
        if name == fixed or name.startswith(f"{fixed}."):
            fix = "use --seeds N" if fixed == "train.seed" else "set it in the recipe"
            raise UserError(
                f"a sweep cannot vary it: {reason}",
                code="sweep-setting-fixed",
                where=f"--over {name}",
                fix=fix,
            )
    if name == "train.epochs" and base.recipe.train.max_steps is not None:
        raise UserError(
            "train.max_steps decides the number of steps, so train.epochs has no effect",
            code="setting-no-effect",
            where=f"--over {name}",
            fix="remove train.max_steps, or vary it instead",
        )
    if match := RANGE.fullmatch(text):
        return {name: _read_range(name, *match.groups())}
    return {name: _read_values(name, text)}


def _read_values(name: str, text: str) -> tuple[Any, ...]:
    """Values separated by commas, each as in a recipe: ``1e-6,3e-6`` or ``[0.9,0.95],[0.9,1]``."""
    try:
        values = override(from_mapping({}), f"values=[{text}]").values["values"]
    except UserError as error:
        raise UserError(
            error.message.replace(f"values=[{text}]", f"{name}={text}"),
            code="sweep-over-syntax",
            where=f"--over {name}",
            fix="separate values by commas, and put lists in brackets",
        ) from None
    if not values:
        raise UserError(
            "the list of values is empty",
            code="sweep-values-empty",
            where=f"--over {name}",
            fix=f"list values separated by commas: {name}=VALUE,VALUE",
        )
    return tuple(values)


def _read_range(name: str, low: str, high: str, scale: str | None) -> ValueRange:
    is_integer = all(re.fullmatch(r"[-+]?\d+", bound) for bound in (low, high))
    is_log = scale == "log"
    if scale not in (None, "log", "linear"):
        problem, fix = f"there is no scale {scale!r}", "end the range with :log or :linear"
    elif float(low) >= float(high):
        problem, fix = f"{low} is not below {high}", "write the smaller bound first"
    elif is_log and float(low) <= 0:
        problem, fix = f"a log range cannot start at {low}", "start above 0, or leave out :log"
    else:
        return ValueRange(float(low), float(high), is_log, is_integer)
    raise UserError(problem, code="sweep-range", where=f"--over {name}", fix=fix)


# Names


def key_of(values: Mapping[str, Any]) -> str:
    """A text that two configurations share exactly if their values are the same."""
    return json.dumps(values, sort_keys=True, default=str)


def short_names(settings: Sequence[str]) -> list[str]:
    """The shortest names that distinguish the settings: their last parts, or all of a name."""
    last = [name.rpartition(".")[2] for name in settings]
    return [
        SHORT_NAMES.get(end, end) if last.count(end) == 1 else name
        for name, end in zip(settings, last, strict=True)
    ]


def label_of(values: Mapping[str, Any]) -> str:
    """The values with the short names of their settings."""
    names = short_names(list(values))
    return ",".join(f"{name}={_text(v)}" for name, v in zip(names, values.values(), strict=True))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str).replace(" ", "")


def folder_name(label: str) -> str:
    """The label as a file name. Labels that lose characters get a hash of the complete label."""
    name = re.sub(r"[^\w.,=+-]+", "_", label).encode()[:MAX_NAME].decode(errors="ignore")
    if name == label:
        return name
    return f"{name}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
