"""What a command is pointed at: a recipe, a run's folder, or a model's or adapter's folder or hub
id.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from valence.config.load import LISTS, LoadedRecipe, load_recipe
from valence.config.parse import COMMAND_LINE
from valence.config.schema import Data, SourceSettings
from valence.data.load import fitting_mapping
from valence.errors import UserError
from valence.reports.runs import config_of
from valence.trainer.methods import Method, method_in, method_of
from valence.trainer.prepare import with_dtype

TRUST = (
    "read these files, then allow it: --trust-remote-code, or for a reward model "
    "settings.trust_remote_code: true"
)


def recipe_of(target: str) -> Path | dict[str, Any]:
    """The recipe that the target is, has or stands for. Raises UserError for another file."""
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        return path
    if path.is_file():
        raise UserError(
            "this is a file",
            code="path-is-file",
            where=target,
            fix="name a model's folder or hub id, a run's folder, or a recipe (.yaml)",
        )
    if is_run(target):
        return config_of(path)
    # numbers should not depend on the machine
    model: dict[str, Any] = {
        "name": target,
        "dtype": "float32",
    }
    if (path / "adapter_config.json").is_file():
        base = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))[
            "base_model_name_or_path"
        ]
        model |= {"name": _base_of_adapter(path, base), "adapter": target}
        if (path / "tokenizer_config.json").is_file():
            model["tokenizer"] = target
    return {"method": "sft", "model": model}


def _base_of_adapter(folder: Path, name: str) -> str:
    """The model below an adapter.

    Of a local folder the adapter holds the last part of the path alone: the run that the adapter
    lies in knows all of it, and so may ``model.name=FOLDER`` on the command line.
    """
    config = folder.parent / "config.yaml"
    if "/" in name or Path(name).exists() or not config.is_file():
        return name
    recorded = load_recipe(config, [], method_of=method_of, training=False).recipe.model.name
    return recorded if Path(recorded).name == name else name


def is_run(target: str) -> bool:
    return Path(target, "config.yaml").is_file()


def load_run_recipe(run_dir: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe of a run's folder.

    Raises UserError when the folder holds no run, or when the folder alone, and no override, allows
    Python files of a model to be executed.
    """
    config = config_of(run_dir)
    source = load_recipe(config, overrides, method_of=method_of, training=False)
    setting = source.settings["model.trust_remote_code"]
    if setting.value and setting.origin != COMMAND_LINE:
        name = source.recipe.model.name
        what = f"this run would execute the Python files that come with the model {name}"
        raise UserError(what, code="code-not-trusted", where=setting.origin, fix=TRUST)
    return source


def method_of_run(run_dir: Path) -> Method:
    """The method that a run trains with. Raises UserError when the folder holds no run."""
    return method_in(load_run_recipe(run_dir, ["model.trust_remote_code=false"]).recipe)


def load_target(target: str, overrides: Sequence[str]) -> LoadedRecipe:
    """The recipe of a target, to be used without training.

    Raises UserError when a run's folder names Python files of a model that no override allows to be
    executed.
    """
    if is_run(target):
        return load_run_recipe(Path(target), overrides)
    return load_recipe(recipe_of(target), overrides, method_of=method_of, training=False)


def with_files(
    target: str | dict[str, Any],
    data: Sequence[str],
    overrides: Sequence[str],
    *,
    own: Data | None = None,
    format: str | None = None,
) -> LoadedRecipe:
    """The recipe of a target (or the one given) with these files, which may be sections as in a
    recipe, as its data.eval.

    A file without keys and format of its own has those of the target's own data (or of ``own``)
    that fit its columns. format: of files that name none.
    """
    listed = ", ".join(
        d if d.lstrip().startswith("{") else json.dumps({"path": d}, ensure_ascii=False)
        for d in data
    )
    ours = ["data.train=[]", "data.test=[]", f"data.eval=[{listed}]", "reference.cache=off"]
    if isinstance(target, str):
        own = own or load_target(target, overrides).recipe.data
        source = with_dtype(load_target(target, [*overrides, *ours]))
    else:
        source = with_dtype(
            load_recipe(target, [*overrides, *ours], method_of=method_of, training=False)
        )
    files = [_as_own_data(file, own, format) for file in source.recipe.data.eval]
    data_section = source.recipe.data.model_copy(update={"eval": files})
    return replace(source, recipe=source.recipe.model_copy(update={"data": data_section}))


def without_rows(source: LoadedRecipe) -> LoadedRecipe:
    """The recipe without any files of rows."""
    data = source.recipe.data.model_copy(update={name: [] for name in LISTS})
    return replace(source, recipe=source.recipe.model_copy(update={"data": data}))


def _as_own_data(file: SourceSettings, own: Data | None, format: str | None) -> SourceSettings:
    """A file with the keys and the format of a recipe's own data that fit it."""
    named = file.model_copy(update={"format": file.format or format})
    if own is None or file.keys or file.format:
        return named
    mapping = fitting_mapping(named, [*own.eval, *own.test, *own.train])
    return (
        named
        if mapping is None
        else named.model_copy(update=dict(zip(("format", "keys"), mapping, strict=True)))
    )


def overrides_to_measure(target: Path, data: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Overrides with which a run or a recipe measures all rows of these files."""
    if not data:
        return []
    files = with_files(str(target), data, overrides).recipe.data.eval
    listed = json.dumps([file.model_dump(mode="json") for file in files], ensure_ascii=False)
    return [f"data.eval={listed}", "data.limit=null", "eval.max_examples=null"]
