"""From a recipe file, its overrides and a method's facts to a checked recipe.

Every setting has an origin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from valence.config import messages
from valence.config.describe import Key, at, dotted, schema_of
from valence.config.files import locate_data, read_chat_template, read_recipe_text
from valence.config.parse import COMMAND_LINE, Given, from_mapping, from_yaml, override, to_yaml
from valence.config.rules import CONTRADICTIONS, NO_EFFECT, SINKS_READ, Case, MethodFacts
from valence.config.schema import Recipe, RewardSettings, Section, SourceSettings
from valence.data.sources import is_hub_dataset
from valence.errors import UserError
from valence.files import check_path, expand_path

M = TypeVar("M", bound=BaseModel)
LISTS = ("train", "eval", "test")
PATHS = {
    "run": ("dir",),
    "model": ("name", "adapter", "tokenizer"),
    "reference": ("model", "cache"),
    "rollout": ("folder", "python"),
}
"""Settings that are paths, or may be, by their section; besides those of data."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of this run.

    ``origin``: default, ``recipe.yaml:12``, command line, or why an automatic one has its value.
    ``is_automatic``: the recipe leaves the value to the program.
    """

    value: object
    origin: str
    is_default: bool
    is_automatic: bool = False


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A checked recipe.

    ``recipe.loss`` holds every setting of the loss; ``settings`` has them all by dotted name.
    """

    recipe: Recipe
    settings: Mapping[str, Setting]

    def to_yaml(self) -> str:
        """Every setting written out, and data paths as they were found.

        Loads as the same recipe.
        """
        return to_yaml(self.recipe.model_dump(mode="json"))

    def with_automatic(self, name: str, value: object, origin: str) -> LoadedRecipe:
        """The recipe with a value for the automatic setting ``section.name``."""
        section, key = name.split(".")
        changed = getattr(self.recipe, section).model_copy(update={key: value})
        setting = Setting(value, origin, is_default=True, is_automatic=True)
        return LoadedRecipe(
            self.recipe.model_copy(update={section: changed}), {**self.settings, name: setting}
        )

    @contextmanager
    def placing(self) -> Generator[None]:
        """Inside the block, an error about a setting also says where the recipe sets it."""
        try:
            yield
        except UserError as error:
            set_here = {
                name: s
                for name, s in self.settings.items()
                if s.origin != "default" and not s.is_automatic
            }
            named = [
                n
                for n, s in set_here.items()
                if isinstance(s.value, str) and repr(s.value) in error.what
            ]
            named += [n for n in re.findall(r"\w+(?:\.\w+)+", error.where or "") if n in set_here]
            if not named or (error.where or "").startswith(set_here[named[0]].origin):
                raise
            where = error.where if named[0] in (error.where or "") else named[0]
            raise UserError(
                error.what,
                code=error.code,
                where=f"{set_here[named[0]].origin} ({where})",
                fix=error.fix,
            ) from error


def load_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    method_of: Callable[[str, bool], MethodFacts],
    training: bool = True,
    in_memory: Collection[str] = (),
) -> LoadedRecipe:
    """Read and check a recipe: a YAML file or a mapping, changed by ``key=value`` overrides.

    A relative data path is looked up in the current directory and then in the recipe's folder.
    ``data.train`` may be a path or a list of paths instead of a list of sections. Names, types and
    ranges are checked first, then what the settings have to do with each other; each check reports
    all it finds at once.

    method_of: facts about a method, as it learns from the policy's own answers (where there is a
    reward) or from stored ones;
        raises UserError for an unknown name.
    training: without it, ``data.train`` may be empty, data files may be missing, and settings may
    have no effect.
    in_memory: those of train, eval and test whose rows are given as objects, whatever the recipe
    says. Raises UserError with the place of each mistake and its remedy.
    """
    if isinstance(source, Mapping):
        given, folder = from_mapping(source), None
    else:
        given, folder = from_yaml(read_recipe_text(Path(source)), str(source)), Path(source).parent
    given = _short_forms(given)
    for assignment in overrides:
        given = _short_forms(override(given, assignment))
    recipe, facts, mixed = _checked_shape(given, method_of)
    problems: list[UserError] = []
    recipe = _paths_expanded(recipe, given, problems)
    for name in LISTS:
        needed = training and name not in in_memory
        found = _files_found(
            getattr(recipe.data, name), ("data", name), given, folder, problems if needed else []
        )
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={name: found})})
    if recipe.data.chat_template is not None:
        try:
            template = read_chat_template(recipe.data.chat_template, folder)
            recipe = recipe.model_copy(
                update={"data": recipe.data.model_copy(update={"chat_template": template})}
            )
        except UserError as error:
            problems.append(
                UserError(
                    error.what,
                    code=error.code,
                    where=given.where(("data", "chat_template")),
                    fix=error.fix,
                )
            )
    mix = [
        part.model_copy(
            update={
                "train": _files_found(
                    part.train, ("mix", i, "train"), given, folder, problems if training else []
                )
            }
        )
        for i, part in enumerate(recipe.mix)
    ]
    recipe = _with_method_defaults(recipe.model_copy(update={"mix": mix}), facts)
    settings = _settings(recipe, facts, given)
    rows = {*in_memory, *(name for name in LISTS if getattr(recipe.data, name))}
    case = Case(recipe, facts, rows, mixed)
    if training:
        problems += _without_effect(case, given, settings)
    problems += _contradictions(case, given)
    if training and "train" not in rows:
        problems.append(
            UserError(
                "there is nothing to train on",
                code="train-data-missing",
                where=given.where(("data", "train")),
                fix="name a file of rows: `train: feedback.jsonl`",
            )
        )
    if problems:
        raise messages.all_of(problems, given.place(()))
    return _with_learning_rate(
        LoadedRecipe(recipe, {dotted(path): setting for path, setting in settings.items()}), case
    )


def _with_learning_rate(loaded: LoadedRecipe, case: Case) -> LoadedRecipe:
    """The recipe with its method's default in place of ``learning_rate: auto``."""
    if loaded.recipe.train.learning_rate != "auto":
        return loaded
    rates = case.method.learning_rates
    value, weights = (rates.adapter, "an adapter") if case.adapts else (rates.full, "all weights")
    return loaded.with_automatic(
        "train.learning_rate", value, f"default of {case.method.name} for {weights}"
    )


def load_reward(reward: str, overrides: Sequence[str] = ()) -> RewardSettings:
    """What a command names to judge answers, changed by ``key=value`` words.

    Raises UserError naming every problem.
    """
    given, problems = from_mapping({"reward": reward}, COMMAND_LINE), list[UserError]()
    for assignment in overrides:
        given = override(given, assignment)
    found = _validate(RewardSettings, given, (), problems)
    if found is None:
        raise messages.all_of(problems, COMMAND_LINE)
    return found


def _short_forms(given: Given) -> Given:
    """Expand what may be written shorter.

    A model may be its name, data the files to train on, a list the one section in it, such a
    section its main setting, and an empty section nothing.
    """
    root = schema_of(Recipe)
    values: dict[str, Any] = {
        name: {} if value is None and at(root, (name,)).get("type") == "object" else value
        for name, value in given.values.items()
    }
    if isinstance(values.get("model"), str):
        values["model"] = {"name": values["model"]}
    if isinstance(values.get("data"), str | list):
        values["data"] = {"train": values["data"]}
    mix = values.get("mix")
    num_parts = len(cast(list[object], mix)) if isinstance(mix, list) else 0
    lists: list[tuple[Key, str]] = [
        *([] if values.get("reward") is None else [(("reward",), "reward")]),
        (("run", "sinks"), "kind"),
        *((("data", name), "path") for name in LISTS),
        *((("mix", i, "train"), "path") for i in range(num_parts)),
    ]
    places = given.places
    for path, name in lists:
        if isinstance(messages.value_at(values, path), dict):  # its settings are those of item 0
            places = {
                (*path, 0, *key[len(path) :])
                if len(key) > len(path) and key[: len(path)] == path
                else key: place
                for key, place in places.items()
            }
        values = _with_list(values, path, name)
    return Given(values, places)


def _with_list(values: Any, path: Key, name: str) -> Any:
    """A copy of ``values`` with a list of sections at ``path``, if anything is there."""
    if not path:
        return _items(values, name)
    part, rest = path[0], path[1:]
    if isinstance(part, int):
        return [*values[:part], _with_list(values[part], rest, name), *values[part + 1 :]]
    if not isinstance(values, dict) or part not in values:
        return cast(object, values)
    section = cast(dict[str, Any], values)
    return {**section, part: _with_list(section[part], rest, name)}


def _items(value: object, name: str) -> object:
    """A list of what may be one section, a text that stands for one with this setting, or null."""
    if value is None:
        return []
    if not isinstance(value, str | dict | list):
        return value
    items = cast(list[object], value) if isinstance(value, list) else [cast(object, value)]
    return [{name: item} if isinstance(item, str) else item for item in items]


def _checked_shape(
    given: Given, method_of: Callable[[str, bool], MethodFacts]
) -> tuple[Recipe, MethodFacts, tuple[MethodFacts, ...]]:
    """Names, types and ranges of every setting; facts about the method and those of `mix`.

    Raises one UserError about all that are wrong.
    """
    problems: list[UserError] = []
    recipe = _validate(Recipe, given, (), problems)
    facts, loss = _method(given, (), method_of, problems)
    mix = given.values.get("mix")
    parts = cast(list[object], mix) if isinstance(mix, list) else []
    mixed = [_method(given, ("mix", i), method_of, problems) for i in range(len(parts))]
    if problems or recipe is None or facts is None or loss is None:
        raise messages.all_of(problems, given.place(()))
    with_losses = [
        p.model_copy(update={"loss": own}) for p, (_, own) in zip(recipe.mix, mixed, strict=True)
    ]
    return (
        recipe.model_copy(update={"loss": loss, "mix": with_losses}),
        facts,
        tuple(f for f, _ in mixed if f is not None),
    )


def _method(
    given: Given,
    path: Key,
    method_of: Callable[[str, bool], MethodFacts],
    problems: list[UserError],
) -> tuple[MethodFacts | None, dict[str, Any] | None]:
    """The method that the section at ``path`` names, and the settings of its loss."""
    section: Any = given.values
    for part in path:
        section = section[part]
    name: Any = cast(dict[str, Any], section).get("method") if isinstance(section, dict) else None
    if not isinstance(name, str) or not name:
        return None, None
    try:
        facts = method_of(name, not path and bool(given.values.get("reward")))
    except UserError as error:
        problems.append(
            UserError(
                error.what, code=error.code, where=given.where((*path, "method")), fix=error.fix
            )
        )
        return None, None
    if not isinstance(cast(dict[str, Any], section).get("loss", {}), dict):
        return facts, None
    loss = _validate(facts.settings, given, (*path, "loss"), problems)
    return facts, None if loss is None else loss.model_dump()


def _validate(model: type[M], given: Given, path: Key, problems: list[UserError]) -> M | None:
    """The values at ``path`` as a model; None if any is wrong, which is added to ``problems``."""
    values = given.values
    for part in path:
        values = values[part] if isinstance(part, int) else values.get(part, {})
    try:
        # As JSON, so that strict types still take a list for a tuple and a whole number for a
        # float.
        return model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        found = {_path_of(e, values): e for e in error.errors(include_url=False)}
        outer = {p[:n] for p in found for n in range(len(p))}
        problems.extend(
            messages.of_setting(model, inner, path, e, given)
            for inner, e in found.items()
            if inner not in outer
        )
        return None


def _path_of(error: ErrorDetails, values: Any) -> Key:
    """Where in ``values`` an error is: its location without the alternatives that were tried."""
    path: Key = ()
    for part in error["loc"]:
        inside = isinstance(values, dict) and part in values
        inside = inside or (
            isinstance(values, list)
            and isinstance(part, int)
            and part < len(cast(list[Any], values))
        )
        if inside:
            values = cast(Any, values)[part]
        elif error["type"] != "missing" or part != error["loc"][-1] or isinstance(part, int):
            continue
        path = (*path, part)
    return path


def _with_method_defaults(recipe: Recipe, facts: MethodFacts) -> Recipe:
    """The recipe with the method's defaults in place of null."""
    filled = {
        name: value
        for name, value in facts.rollout_defaults.items()
        if getattr(recipe.rollout, name) is None
    }
    rollout = recipe.rollout.model_copy(update=filled)
    return recipe.model_copy(update={"rollout": rollout})


def _paths_expanded(recipe: Recipe, given: Given, problems: list[UserError]) -> Recipe:
    """The recipe with ``~`` replaced in its paths.

    Paths that no file system can hold are added to ``problems``.
    """

    def expanded(section: M, names: Sequence[str], path: Key) -> M:
        values: dict[str, str] = {}
        for name in names:
            value = getattr(section, name)
            try:
                values |= (
                    {} if value is None else {name: expand_path(value, given.where((*path, name)))}
                )
            except UserError as error:
                problems.append(error)
        return section.model_copy(update=values)

    sections: dict[str, Any] = {
        name: expanded(getattr(recipe, name), names, (name,)) for name, names in PATHS.items()
    }
    sections["reward"] = [
        expanded(spec, ("reward",), ("reward", i)) for i, spec in enumerate(recipe.reward)
    ]
    sinks = [
        expanded(sink, ("folder",), ("run", "sinks", i)) for i, sink in enumerate(recipe.run.sinks)
    ]
    sections["run"] = sections["run"].model_copy(update={"sinks": sinks})
    return recipe.model_copy(update=sections)


def _files_found(
    sources: Sequence[SourceSettings],
    path: Key,
    given: Given,
    folder: Path | None,
    problems: list[UserError],
) -> list[SourceSettings]:
    """Files with their paths as they were found; missing files are added to ``problems``."""

    def found(source: SourceSettings, path: Key) -> SourceSettings:
        check_path(source.path, given.where((*path, "path")))
        try:
            return source.model_copy(update={"path": locate_data(source.path, folder)})
        except UserError as error:
            problems.append(
                UserError(
                    error.what, code=error.code, where=given.where((*path, "path")), fix=error.fix
                )
            )
            return source

    return [found(source, (*path, index)) for index, source in enumerate(sources)]


def _without_effect(
    case: Case, given: Given, settings: Mapping[Key, Setting]
) -> Iterator[UserError]:
    """Settings that change nothing in this run."""
    for rule in (rule for rule in NO_EFFECT if rule.broken(case)):
        for path, setting in settings.items():
            if fnmatchcase(dotted(path), rule.setting) and not setting.is_default:
                yield messages.no_effect(given, path, rule.why.format(**case.words), rule.fix)
    for path, method, loss in _losses(case):
        for name, needed in method.without_effect(loss).items():
            if loss[name] != method.settings.model_fields[name].get_default():
                why = "under the other settings of the loss it is not read"
                yield messages.no_effect(given, (*path, name), why, f"set {dotted(path)}.{needed}")
    for index, sink in enumerate(case.recipe.run.sinks):
        for name, field in type(sink).model_fields.items():
            default = field.get_default(call_default_factory=True, validated_data={})
            if (
                name != "kind"
                and name not in SINKS_READ[sink.kind]
                and getattr(sink, name) != default
            ):
                fix = f"set one of {', '.join(sorted(SINKS_READ[sink.kind]))}"
                yield messages.no_effect(
                    given, ("run", "sinks", index, name), f"{sink.kind} does not read it", fix
                )
    yield from _splits_of_files(case, given)


def _splits_of_files(case: Case, given: Given) -> Iterator[UserError]:
    """Splits that are named for files, which have none."""
    for name in LISTS:
        for index, source in enumerate[SourceSettings](getattr(case.recipe.data, name)):
            if source.split is not None and not is_hub_dataset(source.path):
                yield messages.no_effect(
                    given,
                    ("data", name, index, "split"),
                    "a file has no splits",
                    "name a data set of the hub",
                )


def _contradictions(case: Case, given: Given) -> Iterator[UserError]:
    """Settings that cannot hold together."""
    kinds = [sink.kind for sink in case.recipe.run.sinks]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            place = given.where(("run", "sinks", index))
            yield UserError(
                f"{kind} is named twice",
                code="setting-duplicate",
                where=place,
                fix="keep one of the two",
            )
    for rule in (rule for rule in CONTRADICTIONS if rule.broken(case)):
        path = tuple(rule.setting.split("."))
        yield UserError(
            rule.why.format(**case.words),
            code="setting-conflict",
            where=given.where(path),
            fix=rule.fix,
        )
    for path, method, loss in _losses(case):
        for name, other in method.contradictions(loss).items():
            what = (
                f"it weighs the tokens of a sum over the answer, and with "
                f"{dotted(path)}.{other} {method.name} reads a mean"
            )
            fix = f"remove one of {dotted(path)}.{name} and {dotted(path)}.{other}"
            yield UserError(
                what, code="setting-conflict", where=given.where((*path, name)), fix=fix
            )


def _losses(case: Case) -> Iterator[tuple[Key, MethodFacts, Mapping[str, Any]]]:
    """The place, the method and the settings of the recipe's loss and of those of `mix`."""
    yield ("loss",), case.method, case.recipe.loss
    for i, (method, part) in enumerate(zip(case.mixed, case.recipe.mix, strict=True)):
        yield ("mix", i, "loss"), method, part.loss


def _settings(recipe: Recipe, facts: MethodFacts, given: Given) -> dict[Key, Setting]:
    """Every setting with its origin, in the order of the schema."""
    of_method: dict[Key, object] = {
        ("rollout", name): value for name, value in facts.rollout_defaults.items()
    }
    settings: dict[Key, Setting] = {}
    for path, value, default in _leaves(recipe, ()):
        if path in of_method:
            settings[path] = _setting_of_method(path, value, of_method[path], facts.name, given)
        elif path != ("loss",):
            settings[path] = _setting(path, value, default, given)
    for name, field in facts.settings.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        settings["loss", name] = _setting(("loss", name), recipe.loss[name], default, given)
    return settings


def _setting(path: Key, value: object, default: object, given: Given) -> Setting:
    origin = given.place(path) if _is_given(given.values, path) else "default"
    return Setting(value, origin, value == default)


def _setting_of_method(
    path: Key, value: object, default: object, method: str, given: Given
) -> Setting:
    """A setting whose default is that of the method."""
    section: Any = given.values.get(str(path[0]))
    chosen = isinstance(section, dict) and cast(dict[Any, Any], section).get(path[1]) is not None
    return Setting(value, given.place(path) if chosen else f"default of {method}", value == default)


def _is_given(values: Any, path: Key) -> bool:
    for part in path:
        if isinstance(part, str) and part not in values:
            return False
        values = values[part]
    return True


def _leaves(section: Section, path: Key) -> Iterator[tuple[Key, object, object]]:
    """Path, value and default of every setting in a section and the sections inside it."""
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), (*path, name)
        if isinstance(value, Section):
            yield from _leaves(value, here)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            for index, item in enumerate(cast(list[Section], value)):
                yield from _leaves(item, (*here, index))
        else:
            yield here, value, field.get_default(call_default_factory=True, validated_data={})
