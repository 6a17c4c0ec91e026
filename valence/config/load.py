"""From a recipe, its overrides and a method to a checked recipe whose settings have an origin."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from valence.config import messages, rules
from valence.config.describe import Key, at, dotted, schema_of
from valence.config.files import locate_data, read_chat_template, read_recipe_text
from valence.config.parse import (
    COMMAND_LINE,
    RawRecipe,
    from_mapping,
    from_yaml,
    override,
    to_yaml,
    value_at,
)
from valence.config.rules import LISTS, Case
from valence.config.schema import Recipe, RewardSettings, Section, SourceSettings
from valence.errors import UserError
from valence.files import check_path, expand_path
from valence.methods import METHODS, ONLINE, WITHOUT_REWARD, Method, method_of
from valence.network import refuse_credentials

M = TypeVar("M", bound=BaseModel)
PATHS = {
    "run": ("dir",),
    "model": ("name", "adapter", "tokenizer"),
    "reference": ("model", "cache"),
    "teacher": ("model",),
    "rollout": ("folder", "python"),
}
"""Settings that are paths, or may be, by section; besides those of data, reward and run.sinks."""
OTHER_TEXT = ("auto", "off", "shipped")
"""Values of eval.other_text that are no files."""
TOKEN_FIX = {
    "teacher": "set the environment variable VLLM_API_KEY to the server's token",
    "reward": "set token_env to the environment variable with the server's token",
    "rollout": "set the environment variable VLLM_API_KEY or OPENAI_API_KEY to the server's token",
    "run": "set the environment variable MLFLOW_TRACKING_URI instead of the setting uri",
}
"""Where the credentials of the servers of a section belong."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of this run.

    ``origin``: default, ``recipe.yaml:12``, command line, or the reason of an automatic value.
    ``is_automatic``: the recipe leaves the value to the program.
    """

    value: object
    origin: str
    is_default: bool
    is_automatic: bool = False


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A checked recipe.

    ``recipe.loss`` holds every setting of the loss; ``settings`` has all settings by dotted name.
    """

    recipe: Recipe
    settings: Mapping[str, Setting]

    def to_yaml(self) -> str:
        """Every setting written out, with resolved data paths.

        Loads as the same recipe.
        """
        return to_yaml(self.recipe.model_dump(mode="json"))

    def with_automatic(self, name: str, value: object, origin: str) -> LoadedRecipe:
        """The recipe with a value for the automatic setting ``section.name``."""
        section, key = name.split(".")
        setting = Setting(value, origin, is_default=True, is_automatic=True)
        return LoadedRecipe(
            _updated(self.recipe, section, **{key: value}), {**self.settings, name: setting}
        )

    @contextmanager
    def placing(self) -> Generator[None]:
        """Inside the block, an error about a setting also names the line that sets it."""
        try:
            yield
        except UserError as error:
            where = error.where or ""
            written = {
                name: setting
                for name, setting in self.settings.items()
                if setting.origin != "default" and not setting.is_automatic
            }
            names = [
                name
                for name, setting in written.items()
                if isinstance(setting.value, str) and repr(setting.value) in error.message
            ]
            sections = [name for name in written if isinstance(written[name].value, Mapping)]
            for name in re.findall(r"\w+(?:\.\w+)*", where):
                names += [name] if name in written else []
                names += [section for section in sections if name.startswith(f"{section}.")]
            entry = re.match(r"\w+\.\d+\.", where)  # of a list, whose first line is named at least
            siblings = [name for name in written if entry and name.startswith(entry[0])]
            names += siblings
            if not names or where.startswith(written[names[0]].origin):
                raise
            place = where if names[0] in where or names[0] in siblings else names[0]
            raise _located(error, f"{written[names[0]].origin} ({place})") from error


def load_recipe(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    training: bool = True,
    in_memory: Collection[str] = (),
    name: str = "recipe",
) -> LoadedRecipe:
    """Read and check a recipe: a YAML file or a mapping, changed by ``key=value`` overrides.

    A relative data path is looked up in the current directory and then in the recipe's folder.
    ``data.train`` may be a path or a list of paths instead of a list of sections. Names, types and
    ranges are checked first, then relations between settings; each of the two checks reports all
    mistakes at once.

    training: if false, ``data.train`` may be empty, data files may be missing, and settings may
    have no effect.
    in_memory: those of train, eval and test whose rows are passed as objects.
    name: of a mapping, for the places of mistakes.

    Raises UserError with the place and the fix of each mistake.
    """
    if isinstance(source, Mapping):
        raw, folder = from_mapping(source, name), None
    else:
        raw, folder = from_yaml(read_recipe_text(Path(source)), str(source)), Path(source).parent
    raw = _expand_short_forms(raw)
    for assignment in overrides:
        raw = _expand_short_forms(override(raw, assignment))
    _refuse_credentials(raw, raw.values, ())
    recipe, method, mixed = _validate_recipe(raw)
    problems: list[UserError] = []
    recipe = _expand_paths(recipe, raw, problems)
    recipe = _locate_files(recipe, raw, folder, problems, training, in_memory)
    if "eval" in in_memory and recipe.data.split:
        recipe = _updated(recipe, "data", eval=[])  # the rows replace the share
    defaults = method.rollout_defaults
    missing = {k: v for k, v in defaults.items() if getattr(recipe.rollout, k) is None}
    recipe = _updated(recipe, "rollout", **missing)
    settings = _settings(recipe, method, raw)
    rows = {*in_memory, *(name for name in LISTS if recipe.data.files(name))}
    if recipe.data.split is not None and "train" in rows:
        rows.add("eval")
    problems += _find_issues(Case(recipe, method, rows, mixed), raw, settings, training)
    if training and "train" not in rows:
        problems.append(
            UserError(
                "the recipe has no training data",
                code="train-data-missing",
                where=raw.where(("data", "train")),
                fix="set data.train to a file of rows, such as `data: {train: feedback.jsonl}`",
            )
        )
    if problems:
        raise messages.all_of(problems, raw.place(()))
    loaded = LoadedRecipe(recipe, {dotted(path): setting for path, setting in settings.items()})
    if recipe.train.learning_rate != "auto":
        return loaded
    rates = method.learning_rates
    rate, weights = (
        (rates.adapter, "an adapter") if recipe.trains_adapter else (rates.full, "all weights")
    )
    return loaded.with_automatic(
        "train.learning_rate", rate, f"default of {method.name} for {weights}"
    )


def load_reward(reward: str, overrides: Sequence[str] = ()) -> RewardSettings:
    """The reward that a command names, changed by ``key=value`` overrides.

    Raises UserError with every mistake.
    """
    raw, problems = from_mapping({"reward": reward}, COMMAND_LINE), list[UserError]()
    for assignment in overrides:
        raw = override(raw, assignment)
    _refuse_credentials(raw, raw.values, ())
    settings = _validate(RewardSettings, raw, (), problems)
    if settings is None:
        raise messages.all_of(problems, COMMAND_LINE)
    return settings


def _updated(recipe: Recipe, section: str, **values: object) -> Recipe:
    """The recipe with other values in a section, which are not validated."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})


def _located(error: UserError, where: str) -> UserError:
    """The error at another place."""
    return UserError(error.message, code=error.code, where=where, fix=error.fix)


# Short forms


def _expand_short_forms(raw: RawRecipe) -> RawRecipe:
    """Write out short forms.

    A model may be its name, data the files to train on, a list its only section, such a section its
    main setting, and an empty section nothing.
    """
    root = schema_of(Recipe)
    values: dict[str, Any] = {
        name: {} if value is None and at(root, (name,)).get("type") == "object" else value
        for name, value in raw.values.items()
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
    places = raw.places
    for path, name in lists:
        if isinstance(value_at(values, path), dict):  # the section becomes item 0 of a list
            places = {
                (*path, 0, *key[len(path) :])
                if len(key) > len(path) and key[: len(path)] == path
                else key: place
                for key, place in places.items()
            }
        values = _with_list(values, path, name)
    if values.get("method") in tuple(WITHOUT_REWARD) and not values.get("reward"):
        values["reward"] = [{"reward": "zero"}]
    rollout = cast(Mapping[str, Any], values.get("rollout") or {})
    has_environment = isinstance(rollout, dict) and rollout.get("environment")
    is_offline = values.get("method") in [name for name in METHODS if name not in ONLINE]
    if has_environment and not is_offline and not values.get("reward"):
        values["reward"] = [{"reward": "environment"}]
    if isinstance(rewards := values.get("reward"), list):
        values["reward"] = [_with_judge(entry) for entry in cast(list[object], rewards)]
    return RawRecipe(values, places)


def _with_judge(entry: object) -> object:
    """An entry of the reward section, of which a judge is the reward."""
    if not isinstance(entry, dict):
        return entry
    section = cast(dict[str, Any], entry)
    is_judge = section.get("judge") is not None and "reward" not in section
    return {"reward": section["judge"], **section} if is_judge else section


def _with_list(values: Any, path: Key, name: str) -> Any:
    """A copy of ``values`` with a list of sections at ``path``, if anything is there.

    There may be one section, or a text that stands for a section with the setting ``name``.
    """
    if path:
        part, rest = path[0], path[1:]
        if isinstance(part, int):
            return [*values[:part], _with_list(values[part], rest, name), *values[part + 1 :]]
        if not isinstance(values, dict) or part not in values:
            return cast(object, values)
        section = cast(dict[str, Any], values)
        return {**section, part: _with_list(section[part], rest, name)}
    if values is None:
        return []
    if not isinstance(values, str | dict | list):
        return values
    items = cast(list[object], values) if isinstance(values, list) else [cast(object, values)]
    return [{name: item} if isinstance(item, str) else item for item in items]


# Names, types and ranges


def _refuse_credentials(raw: RawRecipe, value: Any, path: Key) -> None:
    """Raise UserError for credentials in an address in ``value``, before any message quotes it."""
    if isinstance(value, str):
        section = "reward" if "reward" in path or "judge" in path else path[0]
        fix = TOKEN_FIX.get(str(section), "read them from the environment")
        refuse_credentials(value, raw.where(path), fix=fix)
    elif isinstance(value, dict):
        for name, inner in cast(dict[str, Any], value).items():
            _refuse_credentials(raw, inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(cast(list[Any], value)):
            _refuse_credentials(raw, inner, (*path, index))


def _validate_recipe(
    raw: RawRecipe,
) -> tuple[Recipe, Method, tuple[Method, ...]]:
    """The recipe with valid names, types and ranges, its method and the methods of `mix`.

    Raises one UserError with all mistakes.
    """
    problems: list[UserError] = []
    loss_problems: list[UserError] = []
    method, loss = _validate_method(raw, (), loss_problems)
    loss_names = method.settings.model_fields if method else ()
    recipe = _validate(Recipe, raw, (), problems, loss_names)
    problems += loss_problems
    mix = raw.values.get("mix")
    num_parts = len(cast(list[object], mix)) if isinstance(mix, list) else 0
    mixed = [_validate_method(raw, ("mix", i), problems) for i in range(num_parts)]
    if problems or recipe is None or method is None or loss is None:
        raise messages.all_of(problems, raw.place(()))
    parts = [
        part.model_copy(update={"loss": part_loss})
        for part, (_, part_loss) in zip(recipe.mix, mixed, strict=True)
    ]
    return (
        recipe.model_copy(update={"loss": loss, "mix": parts}),
        method,
        tuple(part_method for part_method, _ in mixed if part_method is not None),
    )


def _validate_method(
    raw: RawRecipe,
    path: Key,
    problems: list[UserError],
) -> tuple[Method | None, dict[str, Any] | None]:
    """The method of the section at ``path``, and the settings of its loss."""
    name = value_at(raw.values, (*path, "method"))
    if not isinstance(name, str) or not name:
        return None, None
    try:
        method = method_of(name, not path and bool(raw.values.get("reward")))
    except UserError as error:
        problems.append(_located(error, raw.where((*path, "method"))))
        return None, None
    loss = value_at(raw.values, path).get("loss", {})
    if not isinstance(loss, dict):
        return method, None
    settings = _validate(method.settings, raw, (*path, "loss"), problems)
    return method, None if settings is None else settings.model_dump()


def _validate(
    model: type[M],
    raw: RawRecipe,
    path: Key,
    problems: list[UserError],
    loss_names: Collection[str] = (),
) -> M | None:
    """The values at ``path`` as a model; None if any is wrong, which is added to ``problems``.

    loss_names: settings of the loss, for hints.
    """
    values = raw.values
    for part in path:
        values = values[part] if isinstance(part, int) else values.get(part, {})
    try:
        # As JSON, so that strict types still take a list for a tuple and a whole number for a
        # float.
        return model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        errors = {_path_of(e, values): e for e in error.errors(include_url=False)}
        outer = {key[:n] for key in errors for n in range(len(key))}
        problems.extend(
            messages.of_setting(model, key, path, e, raw, loss_names)
            for key, e in errors.items()
            if key not in outer
        )
        return None


def _path_of(error: ErrorDetails, values: Any) -> Key:
    """The location of an error in ``values``, without the alternatives that pydantic tried."""
    path: Key = ()
    for part in error["loc"]:
        exists = (isinstance(values, dict) and part in values) or (
            isinstance(values, list)
            and isinstance(part, int)
            and part < len(cast(list[Any], values))
        )
        if exists:
            values = cast(Any, values)[part]
        elif error["type"] != "missing" or part != error["loc"][-1] or isinstance(part, int):
            continue
        path = (*path, part)
    return path


# Paths and files


def _expand_paths(recipe: Recipe, raw: RawRecipe, problems: list[UserError]) -> Recipe:
    """The recipe with ``~`` replaced in its paths.

    Paths that no file system can hold are added to ``problems``.
    """

    def expanded(section: M, names: Sequence[str], path: Key) -> M:
        values: dict[str, str] = {}
        for name in names:
            value = getattr(section, name)
            try:
                if value is not None:
                    values[name] = expand_path(value, raw.where((*path, name)))
            except UserError as error:
                problems.append(error)
        return section.model_copy(update=values)

    sections: dict[str, Any] = {
        name: expanded(getattr(recipe, name), names, (name,)) for name, names in PATHS.items()
    }
    sections["reward"] = [
        expanded(reward, ("reward",), ("reward", i)) for i, reward in enumerate(recipe.reward)
    ]
    sinks = [
        expanded(sink, ("folder",), ("run", "sinks", i)) for i, sink in enumerate(recipe.run.sinks)
    ]
    sections["run"] = sections["run"].model_copy(update={"sinks": sinks})
    return recipe.model_copy(update=sections)


def _locate_files(
    recipe: Recipe,
    raw: RawRecipe,
    folder: Path | None,
    problems: list[UserError],
    training: bool,
    in_memory: Collection[str],
) -> Recipe:
    """The recipe with the paths of its data files and the text of its chat template.

    Missing files of the recipe are added to ``problems`` if the run needs them.
    """

    def located(sources: Sequence[SourceSettings], path: Key, needed: bool) -> list[SourceSettings]:
        resolved: list[SourceSettings] = []
        for i, source in enumerate(sources):
            where = raw.where((*path, i, "path"))
            check_path(source.path, where)
            try:
                source = source.model_copy(update={"path": locate_data(source.path, folder)})
            except UserError as error:
                problems.extend([_located(error, where)] if needed else [])
            resolved.append(source)
        return resolved

    data: dict[str, object] = {
        name: located(files, ("data", name), training and name not in in_memory)
        for name in LISTS
        if (files := recipe.data.files(name))
    }
    if recipe.data.chat_template is not None:
        try:
            data["chat_template"] = read_chat_template(recipe.data.chat_template, folder)
        except UserError as error:
            problems.append(_located(error, raw.where(("data", "chat_template"))))
    if (path := recipe.eval.other_text) not in OTHER_TEXT:
        try:
            recipe = _updated(recipe, "eval", other_text=locate_data(path, folder))
        except UserError as error:
            where = raw.where(("eval", "other_text"))
            problems.extend([_located(error, where)] if training else [])
    mix = [
        part.model_copy(update={"train": located(part.train, ("mix", i, "train"), training)})
        for i, part in enumerate(recipe.mix)
    ]
    return _updated(recipe, "data", **data).model_copy(update={"mix": mix})


# Relations between settings


def _find_issues(
    case: Case, raw: RawRecipe, settings: Mapping[Key, Setting], training: bool
) -> list[UserError]:
    """Mistakes that several settings show together, in the order of the recipe's sections.

    training: also report settings without effect, each once.
    """
    issues = [((), issue) for issue in rules.issues(case)]
    for path, section in _sections(case.recipe, ()):
        issues += [(path, issue) for issue in section.issues()]
    problems: dict[tuple[Key, str], UserError] = {}
    for prefix, issue in issues:
        for name in issue.settings:
            path = (*prefix, *(int(part) if part.isdecimal() else part for part in name.split(".")))
            paths, message = [path], issue.message
            if issue.code == "setting-no-effect":
                inner = [key for key in settings if key[: len(path)] == path]
                changed = [key for key in inner if not settings[key].is_default]
                paths, message = (changed if inner else [path]) if training else [], ""
            for key in paths:
                error = UserError(
                    issue.message, code=issue.code, where=raw.where(key), fix=issue.fix
                )
                problems.setdefault((key, message), error)
    order = list(Recipe.model_fields)
    return [problems[key] for key in sorted(problems, key=lambda k: order.index(str(k[0][0])))]


def _sections(section: Section, path: Key) -> Iterator[tuple[Key, Section]]:
    """The section and all sections inside it, each with its path."""
    yield path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        for index, item in enumerate(cast(list[object], value) if isinstance(value, list) else ()):
            if isinstance(item, Section):
                yield from _sections(item, (*path, name, index))
        if isinstance(value, Section):
            yield from _sections(value, (*path, name))


# Origins


def _settings(recipe: Recipe, method: Method, raw: RawRecipe) -> dict[Key, Setting]:
    """Every setting with its origin, in the order of the schema, then those of the loss."""
    rows = [row for row in _leaves(recipe, ()) if row[0] != ("loss",)]
    rows += [
        (("loss", name), recipe.loss[name], _default(field))
        for name, field in method.settings.model_fields.items()
    ]
    of_method: dict[Key, object] = {
        ("rollout", name): value for name, value in method.rollout_defaults.items()
    }
    has_reward = any(key[:1] == ("reward",) for key in raw.places)
    settings: dict[Key, Setting] = {}
    for path, value, default in rows:
        origin = raw.place(path) if _is_written(raw.values, path) else "default"
        if path in of_method and value_at(raw.values, path) is None:
            origin = f"default of {method.name}"
        is_added = path[0] == "reward" and not has_reward  # that of a method without a reward
        if is_added and path[-1] == "reward":
            origin, default = f"default of {method.name}", value
        settings[path] = Setting(value, origin, value == of_method.get(path, default))
    return settings


def _leaves(section: Section, path: Key) -> Iterator[tuple[Key, object, object]]:
    """Path, value and default of every setting in a section and the sections inside it."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), (*path, name)
        if isinstance(value, Section):
            yield from _leaves(value, key)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            for index, item in enumerate(cast(list[Section], value)):
                yield from _leaves(item, (*key, index))
        else:
            yield key, value, _default(field)
    for name, value in (section.model_extra or {}).items():
        yield (*path, name), value, None


def _default(field: FieldInfo) -> object:
    return field.get_default(call_default_factory=True, validated_data={})


def _is_written(values: Any, path: Key) -> bool:
    for part in path:
        if isinstance(part, str) and part not in values:
            return False
        values = values[part]
    return True
