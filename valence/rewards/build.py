"""Build the reward of a recipe's reward section."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valence.errors import UserError
from valence.rewards.cache import MAX_SCORES, CachedReward, ScoreCache, digest
from valence.rewards.calls import MAX_TIMEOUTS, CallBackend, Calls
from valence.rewards.combine import Combined, RewardPart
from valence.rewards.functions import Function, function_of
from valence.rewards.http import Servers, parse_addresses
from valence.rewards.judge import (
    Grader,
    JudgeModel,
    JudgeSettings,
    PairComparer,
    judge_model,
    parse_judge_settings,
)
from valence.rewards.rules import RULES, Rules, rule_of
from valence.types import Completion, Score
from valence.user_code.load import IMPORT_PATH, PYTHON_FILE, is_import_path

if TYPE_CHECKING:
    from valence.config.schema import RewardSettings

RESERVED_NAMES = ("mean", "std", "min", "max")
"""Names of the metrics of the sum."""
HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
KINDS = (
    "a function (package.module:function), a rule (`valence docs` lists them), the folder or "
    "hub id of a reward model, or the address of a server (http://...)"
)


def is_function(target: str) -> bool:
    """Whether a reward is a function, named by module and function."""
    return target not in RULES and is_import_path(target)


def judge_settings(spec: RewardSettings, where: str) -> JudgeSettings | None:
    """The settings of the LLM judge of an entry; None for another reward."""
    return parse_judge_settings(spec.settings, f"{where}.settings") if spec.judge else None


def is_server(target: str) -> bool:
    """Whether a reward is the address of a server."""
    return target.startswith(("http://", "https://"))


ModelReward = Callable[[str, Mapping[str, Any], str], CallBackend]
"""Loads a reward model from its folder or hub id, its settings, and their place in the recipe."""
FunctionBackend = Callable[["RewardSettings", str], CallBackend]
"""Loads a function for concurrent calls from its entry, and the place of the entry."""


def reward_of(
    specs: Sequence[RewardSettings],
    *,
    model: ModelReward | None = None,
    function: FunctionBackend | None = None,
    cache: Path | None = None,
    keep: int = MAX_SCORES,
) -> Combined:
    """The reward of a recipe's reward section: the weighted sum of its entries.

    model: loads reward models, if supported. function: loads functions; by default they run in this
    process. cache: folder for scores of deterministic rewards; without one they are cached in
    memory. keep: maximum of scores of one reward in memory; 0: no cache. Raises UserError for a
    reward that does not exist or cannot be called.
    """
    names = reward_names(specs)
    parts = list[RewardPart]()
    for i, spec in enumerate(specs):
        if spec.judge is not None:
            grader = Grader(_judge_model(spec, f"reward.{i}", cache))
            calls = _calls_of(spec, names[i], grader)
            parts.append(RewardPart(calls, spec.weight, spec.clip, spec.gate))
            continue
        calls = _calls(spec, names[i], f"reward.{i}", model, function)
        identity = calls.backend.identity if calls.deterministic and keep else None
        reward = (
            calls if identity is None else CachedReward(calls, ScoreCache(cache, identity, keep))
        )
        parts.append(RewardPart(reward, spec.weight, spec.clip, spec.gate))
    return Combined(tuple(parts))


def may_return_feedback(specs: Sequence[RewardSettings]) -> bool:
    """Whether a reward may say something in words: rules and reward models return only numbers."""
    return any(
        spec.judge is not None or is_function(spec.reward) or is_server(spec.reward)
        for spec in specs
    )


class _UnloadedModel:
    """A reward model that is only checked."""

    @property
    def identity(self) -> None:
        return None

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def check_rewards(specs: Sequence[RewardSettings]) -> None:
    """Raise UserError for a reward that does not exist or cannot be called. Loads no models."""
    if specs:
        reward_of(specs, model=lambda name, settings, where: _UnloadedModel())


def list_reward_models(specs: Sequence[RewardSettings]) -> list[tuple[str, Mapping[str, Any], str]]:
    """Folder or hub id, settings and place of each reward model."""
    entries: list[tuple[str, Mapping[str, Any], str]] = []

    def record(*entry: Any) -> _UnloadedModel:
        entries.append(entry)
        return _UnloadedModel()

    reward_of(specs, model=record)
    return entries


def identities(reward: Combined) -> list[Mapping[str, Any] | None]:
    """Everything besides the completions that the scores of rules and reward models depend on.

    None for functions and servers, which users may fix after some completions have scores.
    """
    return [
        None if isinstance(calls.backend, Function | Servers) else calls.backend.identity
        for calls in _all_calls(reward)
    ]


def backend_identities(reward: Combined) -> list[Mapping[str, Any] | None]:
    """For each part everything besides the completions that its scores depend on, such as a
    function's source; None where it is unknown.
    """
    return [calls.backend.identity for calls in _all_calls(reward)]


def calls_functions(reward: Combined) -> bool:
    """Whether a part is a function that runs in this process."""
    return any(isinstance(calls.backend, Function) for calls in _all_calls(reward))


def digests(reward: Combined) -> dict[str, str]:
    """For each part a digest of everything besides the completions that its scores depend on, such
    as a function's source; without parts of unknown identity.
    """
    return {
        calls.name: digest(identity)
        for calls in _all_calls(reward)
        if (identity := calls.backend.identity) is not None
    }


def _all_calls(reward: Combined) -> list[Calls]:
    rewards = [
        part.reward.inner if isinstance(part.reward, CachedReward) else part.reward
        for part in reward.parts
    ]
    return [calls for calls in rewards if isinstance(calls, Calls)]


def reward_names(specs: Sequence[RewardSettings]) -> list[str]:
    """Names of the metrics. Raises UserError for an invalid or duplicate one."""
    names = [spec.name or _entry_name(spec) for spec in specs]
    for i, name in enumerate(names):
        where = f"reward.{i}.name"
        if not re.fullmatch(r"[\w.+-]+", name) or name in RESERVED_NAMES:
            raise UserError(
                f"{name!r} is not a valid metric name",
                code="reward-name-invalid",
                where=where,
                fix="use letters, digits and _ . + - only",
            )
        if name in names[:i]:
            raise UserError(
                f"two rewards have the name {name!r}",
                code="reward-name-duplicate",
                where=where,
                fix="set a different `name` for each",
            )
    return names


def _entry_name(spec: RewardSettings) -> str:
    """The name of an entry: of an LLM judge, that of its model."""
    model = spec.settings.get("model")
    if spec.judge is not None and isinstance(model, str):
        return re.sub(r"[^\w.+-]+", "-", model) or "judge"
    return _default_name(spec.reward)


def _default_name(target: str) -> str:
    """The name of a reward without one: its function, rule, host or the end of its path."""
    if target.startswith(("http://", "https://")):
        host = re.sub(r"^https?://([^@/]*@)?", "", target.split(",")[0]).partition("/")[0]
        return re.sub(r"[^\w.-]+", "-", host) or "server"
    last = target.rstrip("/").rpartition(":" if IMPORT_PATH.fullmatch(target) else "/")[2]
    return re.sub(r"[^\w.+-]+", "-", last)


def _calls(
    spec: RewardSettings,
    name: str,
    where: str,
    model: ModelReward | None,
    function: FunctionBackend | None,
) -> Calls:
    if spec.clip is not None and not spec.clip[0] <= spec.clip[1]:
        raise UserError(
            f"the minimum {spec.clip[0]:g} is larger than the maximum {spec.clip[1]:g}",
            code="reward-setting-value",
            where=f"{where}.clip",
            fix="write the smaller number first",
        )
    backend, is_deterministic, is_concurrent = _backend(spec, where, model, function)
    return Calls(
        name,
        backend,
        spec.deterministic or is_deterministic,
        batch_size=spec.batch_size,
        retries=spec.retries,
        concurrency=spec.concurrency if is_concurrent else 1,
        patience=MAX_TIMEOUTS * spec.timeout,
    )


def _calls_of(spec: RewardSettings, name: str, backend: Grader | PairComparer) -> Calls:
    """Calls of an LLM judge: one request each. Replies are cached separately."""
    return Calls(
        name,
        backend,
        deterministic=False,
        batch_size=1,
        retries=spec.retries,
        concurrency=spec.concurrency,
        patience=MAX_TIMEOUTS * spec.timeout,
    )


def _backend(
    spec: RewardSettings, where: str, model: ModelReward | None, function: FunctionBackend | None
) -> tuple[CallBackend, bool, bool]:
    """The backend, whether it is always deterministic, and whether calls may overlap."""
    target, settings = spec.reward, spec.settings
    place = f"{where}.settings"
    if is_server(target):
        return _servers(spec, where), False, True
    if spec.token_env is not None:
        raise UserError(
            "only reward servers use a token",
            code="reward-setting-unused",
            where=f"{where}.token_env",
            fix="remove it",
        )
    if target in RULES:
        return Rules(target, rule_of(target, settings, place), settings, spec.timeout), True, False
    if is_function(target):
        if function is not None:
            return function(spec, f"{where}.reward"), False, True
        backend = function_of(target, settings, spec.timeout, where)
        return backend, False, not backend.blocking
    _check_model(target, f"{where}.reward", model)
    assert model is not None
    return model(target, settings, where), True, False


def pair_calls(spec: RewardSettings, folder: Path | None) -> Calls:
    """Comparisons of two answers (``ShownPair``) by the LLM judge of an entry. folder: for its
    replies.
    """
    return _calls_of(
        spec, reward_names([spec])[0], PairComparer(_judge_model(spec, "reward.0", folder))
    )


def _judge_model(spec: RewardSettings, where: str, folder: Path | None) -> JudgeModel:
    assert spec.judge is not None
    token = _token(spec, where)
    return judge_model(
        spec.judge, spec.settings, seconds=spec.timeout, token=token, folder=folder, where=where
    )


def _token(spec: RewardSettings, where: str) -> str | None:
    """The bearer token of a server."""
    if spec.token_env is None:
        return None
    token = os.environ.get(spec.token_env)
    if not token:
        raise UserError(
            f"the environment variable {spec.token_env} is not set or is empty",
            code="environment-variable-missing",
            where=f"{where}.token_env",
            fix="set it to the server's token",
        )
    return token


def _servers(spec: RewardSettings, where: str) -> Servers:
    unknown = sorted(spec.settings.keys() - {"label"})
    if unknown or not isinstance(spec.settings.get("label", ""), str):
        setting = unknown[0] if unknown else "label"
        raise UserError(
            f"reward servers have no setting {setting!r}"
            if unknown
            else "label must be the name of a column",
            code="reward-setting-unknown" if unknown else "reward-setting-value",
            where=f"{where}.settings.{setting}",
            fix="use label, the only setting: the name of the column to send as label",
        )
    token = _token(spec, where)
    urls = parse_addresses(spec.reward, f"{where}.reward")
    return Servers(urls, spec.timeout, spec.settings.get("label"), token)


def _check_model(target: str, where: str, model: ModelReward | None) -> None:
    """Raise UserError for a name that is not meant as a model."""
    path = Path(target)
    if path.is_dir() and model is not None:
        return
    place = f"{where}: {target}"
    if path.is_file() or PYTHON_FILE.search(target):
        function = (
            f"{path.with_suffix('').as_posix().replace('/', '.').partition('.py:')[0]}:function"
        )
        raise UserError(
            "a file is not a reward",
            code="reward-not-found",
            where=place,
            fix=f"write {function} for a function in this file; a reward is {KINDS}",
        )
    if HOST_AND_PORT.fullmatch(target):
        raise UserError(
            "the address of the server has no scheme",
            code="reward-not-found",
            where=place,
            fix=f"write http://{target}",
        )
    if target == "judge":
        raise UserError(
            "a judge needs the address of its server",
            code="reward-not-found",
            where=place,
            fix="write `judge: http://HOST:PORT/v1` instead of `reward: judge` (`valence docs "
            "rewards`)",
        )
    close = get_close_matches(target, RULES, 1, 0.7)
    if close:
        raise UserError(
            f"there is no reward {target!r}",
            code="reward-not-found",
            where=place,
            fix=f"did you mean {close[0]}? Otherwise use {KINDS}",
        )
    if DOTTED.fullmatch(target):
        package, _, last = target.rpartition(".")
        raise UserError(
            "a function needs a colon between its module and its name",
            code="reward-not-found",
            where=place,
            fix=f"write {package}:{last} for a function; a reward is {KINDS}",
        )
    if model is None:
        raise UserError(
            f"{target!r} is neither a function, nor a rule, nor an address, and this call does not "
            "load reward models",
            code="reward-model-unsupported",
            where=place,
            fix="use a function, a rule, or the address of a server, or pass `model` to reward_of",
        )
