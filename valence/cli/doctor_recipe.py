"""What a recipe needs of a machine that is not there: models, libraries, folders, a device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from valence.cli.doctor_checks import EXTRAS, Check, writable
from valence.config.load import load_recipe
from valence.config.schema import Recipe
from valence.errors import UserError, install_command
from valence.models import speed
from valence.models.loading import is_cached, must_exist
from valence.network import DEADLINE, within
from valence.reports.trackers import check
from valence.trainer.methods import method_of

OF_RULES = {"maths": "math_verify", "json_schema": "jsonschema", "vader": "vaderSentiment"}
"""What a rule imports."""


def examine_recipe(path: Path, overrides: Sequence[str]) -> Iterator[Check]:
    """One line for each thing that the recipe needs beyond what every run does."""
    try:
        recipe = load_recipe(path, overrides, method_of=method_of).recipe
    except UserError as error:
        yield Check("recipe", "settings", "problem", _where(error), error.fix or "", needed=True)
        return
    yield Check("recipe", "settings", "ok", f"{path}: {recipe.method}")
    yield from (_model(setting, name) for setting, name in _models(recipe).items())
    yield from _libraries(recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = speed.automatic_dtype()[0] if recipe.model.dtype == "auto" else recipe.model.dtype
    what, _, fix = speed.slow(device, getattr(torch, dtype)).partition(": ")
    yield Check(
        "recipe",
        "model.dtype",
        "problem" if what else "ok",
        what or f"{dtype} on {device.type}",
        fix,
    )
    yield writable(
        "recipe",
        "run.dir",
        Path(recipe.run.dir),
        "set run.dir to a folder that you may write to",
        needed=True,
    )
    if recipe.train.compile == "on" and device.type == "cpu" and not shutil.which("g++"):
        fix = "install g++, or set train.compile: auto"
        yield Check("recipe", "train.compile", "problem", "there is no g++", fix, needed=True)
    for reward in recipe.reward:
        if reward.token_env and not os.environ.get(reward.token_env):
            what = f"the environment has no variable {reward.token_env}"
            yield Check(
                "recipe",
                "reward.token_env",
                "problem",
                what,
                "set it to the server's token",
                needed=True,
            )


def _where(error: UserError) -> str:
    return f"{error.where}: {error.what}" if error.where else error.what


def _models(recipe: Recipe) -> dict[str, str]:
    """Folders and hub ids that are loaded, by the setting that names them."""
    named = {
        "model.name": recipe.model.name,
        "model.tokenizer": recipe.model.tokenizer,
        "model.adapter": recipe.model.adapter,
        "reference.model": recipe.reference.model,
    }
    return {setting: name for setting, name in named.items() if name}


def _model(setting: str, name: str) -> Check:
    """Whether a model, adapter or tokenizer is there, or can be downloaded."""
    from huggingface_hub import constants

    try:
        must_exist(name, setting)
    except UserError as error:
        return Check("recipe", setting, "problem", error.what, error.fix or "", needed=True)
    if Path(name).is_dir():
        return Check("recipe", setting, "ok", f"the folder {name}")
    if is_cached(name, setting):
        return Check("recipe", setting, "ok", f"{name}, downloaded before")
    if problem := within(DEADLINE, partial(_refused, name)):
        fix = (
            f"check the name; of a gated model ask for access at {constants.ENDPOINT}/{name} "
            f"and run `hf auth login`"
        )
        return Check(
            "recipe",
            setting,
            "problem",
            f"{name} cannot be downloaded: {problem}",
            fix,
            needed=True,
        )
    return Check("recipe", setting, "ok", f"{name}, which will be downloaded")


def _refused(name: str) -> str:
    """Why the hub does not give out a model; empty when it does."""
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        auth_check(name)
    except GatedRepoError:
        return "it is gated, and this account has no access"
    except RepositoryNotFoundError:
        return "there is no such model, or it is private"
    return ""


def _libraries(recipe: Recipe) -> Iterator[Check]:
    """Libraries that only some settings need, and that are not installed."""
    wanted = {
        f"reward: {each.reward}": OF_RULES[each.reward]
        for each in recipe.reward
        if each.reward in OF_RULES
    }
    wanted |= {"model.quantize": "bitsandbytes"} if recipe.model.quantize else {}
    wanted |= {"train.optimizer": "bitsandbytes"} if recipe.train.optimizer == "adamw_8bit" else {}
    wanted |= {"model.gguf_file": "gguf"} if recipe.model.gguf_file else {}
    for setting, module in wanted.items():
        extra = next(extra for extra, (modules, _) in EXTRAS.items() if module in modules)
        if find_spec(module) is None:
            fix = install_command(extra)
            yield Check(
                "recipe", setting, "problem", f"{module} is not installed", fix, needed=True
            )
        else:
            yield Check("recipe", setting, "ok", f"{module} is installed")
    for sink in recipe.run.sinks:
        try:
            said = check(sink.model_dump())
            yield Check("recipe", f"run.sinks: {sink.kind}", "ok", said or "installed")
        except UserError as error:
            yield Check(
                "recipe",
                f"run.sinks: {sink.kind}",
                "problem",
                error.what,
                error.fix or "",
                needed=True,
            )
    elsewhere = os.environ.get("VALENCE_VLLM_PYTHON") or recipe.rollout.python
    if (
        recipe.rollout.engine == "vllm"
        and recipe.rollout.start
        and not elsewhere
        and find_spec("vllm") is None
    ):
        fix = (
            "name the Python of an environment that has it in rollout.python or VALENCE_VLLM_PYTHON"
        )
        yield Check(
            "recipe", "rollout.start", "problem", "vllm is not installed here", fix, needed=True
        )
