"""Resolve the target of a command: a recipe, a run, or a model or adapter (folder or hub id)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from valence.config.files import read_recipe_text
from valence.config.load import LISTS, LoadedRecipe, load_recipe
from valence.config.needs import method_in
from valence.config.parse import COMMAND_LINE, from_yaml
from valence.config.schema import Data, Recipe, SourceSettings
from valence.data.kind_names import METHOD_FOR
from valence.data.load import fitting_mapping
from valence.distributed.process_group import Group, SingleProcess, run_on_first_rank
from valence.errors import UserError
from valence.methods import Method
from valence.models.dtypes import automatic_dtype
from valence.models.loading import loading
from valence.reports.run_record import RECIPE, config_of, is_run, read_undamaged_facts
from valence.storage import read_json
from valence.user_code.load import is_import_path

TRUST = (
    "read these files, then allow it: --trust-remote-code, or for a reward model "
    "settings.trust_remote_code: true"
)


def recipe_of(target: str) -> Path | dict[str, Any]:
    """The recipe of a target; for a model, one made for it. Raises UserError for other files."""
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        return path
    if path.is_file():
        raise UserError(
            "this is a file, but not a recipe (.yaml)",
            code="path-is-file",
            where=target,
            fix="use a model folder, a hub id, a run folder, or a recipe (.yaml)",
        )
    if is_run(target):
        return config_of(path)
    _check_has_model(path)
    # float32, so that numbers do not depend on the machine
    model: dict[str, Any] = {"name": target, "dtype": "float32"}
    if (path / "adapter_config.json").is_file():
        with loading("adapter", target):
            base = read_json(path / "adapter_config.json")["base_model_name_or_path"]
            name = _base_of_adapter(path, str(base))
        model |= {"name": name, "adapter": target}
        if (path / "tokenizer_config.json").is_file():
            model["tokenizer"] = target
    return {"method": "sft", "model": model}


def _check_has_model(folder: Path) -> None:
    """Raise UserError for a folder that contains neither a run nor a model."""
    files = ("config.json", "adapter_config.json", "*.gguf")
    if not folder.is_dir() or any(any(folder.glob(name)) for name in files):
        return
    runs = sorted(path.parent for path in folder.glob(f"*/{RECIPE}"))
    example = f", such as {runs[-1]}" if runs else ""
    raise UserError(
        "the folder contains no run, model or adapter",
        code="model-not-loadable",
        where=str(folder),
        fix="use a run folder (with config.yaml), or the folder of a model (config.json) or "
        f"adapter (adapter_config.json){example}",
    )


def _base_of_adapter(folder: Path, name: str) -> str:
    """The base model of an adapter.

    An adapter that was uploaded, or that an earlier version wrote, records only the last part of
    the path of a local base model; the run around the adapter has all of it. Otherwise
    ``model.name=FOLDER`` on the command line gives it.
    """
    config = folder.parent / RECIPE
    if "/" in name or Path(name).exists() or not config.is_file():
        return name
    recorded = load_recipe(config, [], training=False).recipe.model.name
    return recorded if Path(recorded).name == name else name


def load_run_recipe(run_dir: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe of a run's folder.

    Raises UserError if the folder holds no run, or if only its recipe, and no override, allows
    Python files of a model to be executed.
    """
    config = config_of(run_dir)
    if custom_method(run_dir) and not any(o.split("=")[0].strip() == "method" for o in overrides):
        # The commands that need no loss must not execute code that only the folder names.
        overrides = [f"method={_stand_in(run_dir)}", "loss=null", "mix=[]", *overrides]
    source = load_recipe(config, overrides, training=False)
    setting = source.settings["model.trust_remote_code"]
    if setting.value and setting.origin != COMMAND_LINE:
        raise UserError(
            f"this run would execute the Python files of the model {source.recipe.model.name}",
            code="code-not-trusted",
            where=setting.origin,
            fix=TRUST,
        )
    return source


def custom_method(run_dir: Path) -> str | None:
    """The import path of a user's loss that the recipe of a run names; None without one."""
    config = config_of(run_dir)
    values = from_yaml(read_recipe_text(config), str(config)).values
    parts = values.get("mix") or ()
    names = [
        values.get("method"),
        *(part.get("method") for part in parts if isinstance(part, dict)),
    ]
    return next((name for name in names if isinstance(name, str) and is_import_path(name)), None)


def _stand_in(run_dir: Path) -> str:
    """The method of Valence that stands in for the user's, as the run recorded it."""
    name = read_undamaged_facts(run_dir).get("stand_in")
    return (
        name if isinstance(name, str) and not is_import_path(name) else METHOD_FOR["demonstration"]
    )


def require_loss(run_dir: Path, recipe: Recipe) -> None:
    """Raise UserError if a run has a user's loss that its recipe was opened without."""
    name = custom_method(run_dir)
    if name is None or method_in(recipe).is_custom:
        return
    raise UserError(
        f"this needs the loss of the run, and would execute {name}",
        code="code-not-trusted",
        where=str(run_dir / RECIPE),
        fix=f"check this code, then add method={name}",
    )


def method_of_run(run_dir: Path) -> Method:
    """The method of a run. Raises UserError if the folder holds no run."""
    return method_in(load_run_recipe(run_dir, ["model.trust_remote_code=false"]).recipe)


def with_dtype(source: LoadedRecipe, group: Group | None = None) -> LoadedRecipe:
    """Replace ``model.dtype: auto`` by the type that suits rank 0's machine, for all of group."""
    if source.recipe.model.dtype != "auto":
        return source
    return source.with_automatic(
        "model.dtype", *run_on_first_rank(group or SingleProcess(), automatic_dtype)
    )


def load_target(target: str, overrides: Sequence[str]) -> LoadedRecipe:
    """The recipe of a target, to be used without training. Raises as ``load_run_recipe``."""
    if is_run(target):
        return load_run_recipe(Path(target), overrides)
    return load_recipe(recipe_of(target), overrides, training=False, name=target)


def with_files(
    target: str | dict[str, Any],
    data: Sequence[str],
    overrides: Sequence[str],
    *,
    recorded: Data | None = None,
    format: str | None = None,
) -> LoadedRecipe:
    """A recipe, given as a target or as a mapping, with these files as its data.eval.

    data: paths, or sections as in a recipe. A file without keys and format gets those of the
    target's data (or of ``recorded``) that fit its columns. format: the default of all files.
    """
    listed = ", ".join(
        d if d.lstrip().startswith("{") else json.dumps({"path": d}, ensure_ascii=False)
        for d in data
    )
    overrides_here = [
        *overrides,
        "data.train=[]",
        "data.test=[]",
        f"data.eval=[{listed}]",
        "reference.cache=off",
    ]
    if isinstance(target, str):
        recorded = recorded or load_target(target, overrides).recipe.data
        source = with_dtype(load_target(target, overrides_here))
    else:
        source = with_dtype(load_recipe(target, overrides_here, training=False))
    files = [
        _with_fitting_keys(file, recorded, format) for file in source.recipe.data.files("eval")
    ]
    data_section = source.recipe.data.model_copy(update={"eval": files})
    return replace(source, recipe=source.recipe.model_copy(update={"data": data_section}))


def without_rows(source: LoadedRecipe) -> LoadedRecipe:
    """The recipe without any files of rows."""
    data = source.recipe.data.model_copy(update={name: [] for name in LISTS})
    return replace(source, recipe=source.recipe.model_copy(update={"data": data}))


def _with_fitting_keys(
    file: SourceSettings, recorded: Data | None, format: str | None
) -> SourceSettings:
    """The file with the keys and format of a recipe's data that fit its columns."""
    with_format = file.model_copy(update={"format": file.format or format})
    if recorded is None or file.keys or file.format:
        return with_format
    others = [*recorded.files("eval"), *recorded.test, *recorded.train]
    mapping = fitting_mapping(with_format, others)
    if mapping is None:
        return with_format
    return with_format.model_copy(update=dict(zip(("format", "keys"), mapping, strict=True)))


def overrides_to_measure(target: Path, data: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Overrides that make a run or a recipe evaluate all rows of these files."""
    if not data:
        return []
    files = with_files(str(target), data, overrides).recipe.data.files("eval")
    listed = json.dumps([file.model_dump(mode="json") for file in files], ensure_ascii=False)
    return [f"data.eval={listed}", "data.limit=null", "eval.max_examples=null"]
