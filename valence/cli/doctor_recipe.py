"""Check what a recipe needs: models, libraries, folders and a device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from valence.cli.doctor_checks import EXTRAS, Check, check_writable
from valence.config.load import load_recipe
from valence.config.schema import Recipe
from valence.errors import UserError, install_command
from valence.models.dtypes import automatic_dtype, slow_dtype
from valence.models.loading import is_cached, must_exist
from valence.network import DEADLINE, within
from valence.reports.trackers import check

RULE_MODULES = {"maths": "math_verify", "json_schema": "jsonschema", "vader": "vaderSentiment"}
"""The module that a reward rule imports."""


def examine_recipe(path: Path, overrides: Sequence[str]) -> Iterator[Check]:
    """Check each thing that the recipe needs in addition to what all runs need."""
    try:
        recipe = load_recipe(path, overrides).recipe
    except UserError as error:
        yield Check("recipe", "settings", "problem", _where(error), error.fix or "", needed=True)
        return
    yield Check("recipe", "settings", "ok", f"{path}: {recipe.method}")
    yield from (_model(setting, name) for setting, name in _models(recipe).items())
    yield from _libraries(recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = automatic_dtype()[0] if recipe.model.dtype == "auto" else recipe.model.dtype
    problem, _, fix = slow_dtype(device, getattr(torch, dtype)).partition(": ")
    yield Check(
        "recipe",
        "model.dtype",
        "problem" if problem else "ok",
        problem or f"{dtype} on {device.type}",
        fix,
    )
    yield check_writable(
        "recipe",
        "run.dir",
        Path(recipe.run.dir),
        "set run.dir to a folder where you have write permission",
        needed=True,
    )
    if recipe.train.compile == "on" and device.type == "cpu" and not shutil.which("g++"):
        fix = "install g++, or set train.compile: auto"
        yield Check("recipe", "train.compile", "problem", "g++ is not installed", fix, needed=True)
    for reward in recipe.reward:
        if reward.token_env and not os.environ.get(reward.token_env):
            problem = f"the environment variable {reward.token_env} is not set"
            yield Check(
                "recipe",
                "reward.token_env",
                "problem",
                problem,
                "set it to the server's token",
                needed=True,
            )


def _where(error: UserError) -> str:
    return f"{error.where}: {error.message}" if error.where else error.message


def _models(recipe: Recipe) -> dict[str, str]:
    """The folders and hub ids to load, by setting."""
    names = {
        "model.name": recipe.model.name,
        "model.tokenizer": recipe.model.tokenizer,
        "model.adapter": recipe.model.adapter,
        recipe.reference_model[0]: recipe.reference_model[1],
    }
    return {setting: name for setting, name in names.items() if name}


def _model(setting: str, name: str) -> Check:
    """Check whether a model, adapter or tokenizer exists or can be downloaded."""
    from huggingface_hub import constants

    try:
        must_exist(name, setting)
    except UserError as error:
        return Check("recipe", setting, "problem", error.message, error.fix or "", needed=True)
    if Path(name).is_dir():
        return Check("recipe", setting, "ok", f"folder {name}")
    if is_cached(name, setting):
        return Check("recipe", setting, "ok", f"{name}, in the download cache")
    if problem := within(DEADLINE, partial(_access_problem, name)):
        fix = (
            f"check the name; for a gated model, request access at {constants.ENDPOINT}/{name} "
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
    return Check("recipe", setting, "ok", f"{name}, will be downloaded")


def _access_problem(name: str) -> str:
    """Why the hub does not give access to a model; empty if it does."""
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        auth_check(name)
    except GatedRepoError:
        return "the model is gated and this account has no access"
    except RepositoryNotFoundError:
        return "the model does not exist or is private"
    return ""


def _libraries(recipe: Recipe) -> Iterator[Check]:
    """Check the libraries that single settings need."""
    needed = {
        f"reward: {spec.reward}": RULE_MODULES[spec.reward]
        for spec in recipe.reward
        if spec.reward in RULE_MODULES
    }
    needed |= {"model.quantize": "bitsandbytes"} if recipe.model.quantize else {}
    needed |= {"train.optimizer": "bitsandbytes"} if recipe.train.optimizer == "adamw_8bit" else {}
    needed |= {"model.gguf_file": "gguf"} if recipe.model.gguf_file else {}
    for setting, module in needed.items():
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
            note = check(sink.model_dump())
            yield Check("recipe", f"run.sinks: {sink.kind}", "ok", note or "installed")
        except UserError as error:
            yield Check(
                "recipe",
                f"run.sinks: {sink.kind}",
                "problem",
                error.message,
                error.fix or "",
                needed=True,
            )
    vllm_python = os.environ.get("VALENCE_VLLM_PYTHON") or recipe.rollout.python
    if (
        recipe.rollout.engine == "vllm"
        and recipe.rollout.start
        and not vllm_python
        and find_spec("vllm") is None
    ):
        fix = "set rollout.python or VALENCE_VLLM_PYTHON to the Python of an environment with vLLM"
        yield Check(
            "recipe",
            "rollout.start",
            "problem",
            "vLLM is not installed in this environment",
            fix,
            needed=True,
        )
