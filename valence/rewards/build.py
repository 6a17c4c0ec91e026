"""From the reward section of a recipe to one reward."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valence.errors import UserError
from valence.rewards.cache import MOST, Cached, Kept, digest
from valence.rewards.calls import MAX_TIMEOUTS, CallBackend, Calls
from valence.rewards.combine import Combined, RewardPart
from valence.rewards.functions import Function, function_of
from valence.rewards.http import Servers, parse_addresses
from valence.rewards.rules import RULES, Rules, rule_of
from valence.types import Completion, Score

if TYPE_CHECKING:
    from valence.config.schema import RewardSettings

NAMES_OF_OURS = ("mean", "std", "min", "max")
"""What the log says of the sum."""
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
OF_A_FILE = re.compile(r"\.py(:|$)")
HOST = re.compile(r"[\w.-]+:\d+(/.*)?")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
KINDS = (
    "a function (package.module:function), a rule (`valence rewards` lists them), a model's "
    "folder or hub id, or an http address"
)


def is_function(target: str) -> bool:
    """Whether a reward is a function, whose module is imported."""
    return target not in RULES and bool(FUNCTION.fullmatch(target)) and not OF_A_FILE.search(target)


def is_server(target: str) -> bool:
    """Whether a reward is asked for over the network."""
    return target.startswith(("http://", "https://"))


ModelReward = Callable[[str, Mapping[str, Any], str], CallBackend]
"""Loads a reward model: its folder or hub id, the entry's settings, and where they are for
messages.
"""
FunctionBackend = Callable[["RewardSettings", str], CallBackend]
"""Loads a function that its backend may call several times at once: the entry, and where its
function is for messages.
"""


def reward_of(
    specs: Sequence[RewardSettings],
    *,
    model: ModelReward | None = None,
    function: FunctionBackend | None = None,
    cache: Path | None = None,
    keep: int = MOST,
) -> Combined:
    """What a recipe's reward section describes: its entries added up, each times its weight.

    model: loads reward models, where they can be used. function: loads functions; by default they
    run in this process. cache: the folder in which scores of deterministic rewards are kept;
    without one they are kept in memory. keep: so many of each in memory; 0: none are kept, nor
    written. Raises UserError for what cannot be found or called, before anything is scored.
    """
    names = _names(specs)
    parts = list[RewardPart]()
    for i, spec in enumerate(specs):
        calls = _calls(spec, names[i], f"reward.{i}", model, function)
        identity = calls.backend.identity if calls.deterministic and keep else None
        reward = calls if identity is None else Cached(calls, Kept(cache, identity, keep))
        parts.append(RewardPart(reward, spec.weight, spec.clip, spec.gate))
    return Combined(tuple(parts))


class _NotLoaded:
    """Stands for a reward model where rewards are checked without loading models."""

    @property
    def identity(self) -> None:
        return None

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def check_rewards(specs: Sequence[RewardSettings]) -> None:
    """Raise UserError for a reward that cannot be found or called, without loading models."""
    if specs:
        reward_of(specs, model=lambda name, settings, where: _NotLoaded())


def list_reward_models(specs: Sequence[RewardSettings]) -> list[tuple[str, Mapping[str, Any], str]]:
    """The reward models among the rewards: folder or hub id, settings, and where these are set."""
    entries: list[tuple[str, Mapping[str, Any], str]] = []

    def record(*entry: Any) -> _NotLoaded:
        entries.append(entry)
        return _NotLoaded()

    reward_of(specs, model=record)
    return entries


def identities(reward: Combined) -> list[Mapping[str, Any] | None]:
    """What the scores of each part depend on besides the answers, of rules and reward models.

    None for functions and servers, which are mended while there are scores already.
    """
    return [
        None if isinstance(each.backend, Function | Servers) else each.backend.identity
        for each in _called(reward)
    ]


def digests(reward: Combined) -> dict[str, str]:
    """By the name of each part a digest of what its scores depend on besides the answers, such as a
    function's source; without those of which that is not known.
    """
    return {
        each.name: digest(identity)
        for each in _called(reward)
        if (identity := each.backend.identity) is not None
    }


def _called(reward: Combined) -> list[Calls]:
    called = [
        part.reward.inner if isinstance(part.reward, Cached) else part.reward
        for part in reward.parts
    ]
    return [each for each in called if isinstance(each, Calls)]


def _names(specs: Sequence[RewardSettings]) -> list[str]:
    """Of the numbers in the log. Raises UserError when two have one name."""
    names = [spec.name or _short(spec.reward) for spec in specs]
    for i, name in enumerate(names):
        where = f"reward.{i}.name"
        if not re.fullmatch(r"[\w.+-]+", name) or name in NAMES_OF_OURS:
            raise UserError(
                f"{name!r} cannot name a number in the log",
                code="reward-name-invalid",
                where=where,
                fix="give it another, of letters and digits",
            )
        if name in names[:i]:
            raise UserError(
                f"two rewards have the name {name!r}",
                code="reward-name-duplicate",
                where=where,
                fix="give each a `name`",
            )
    return names


def _short(target: str) -> str:
    """A name for a reward without one: its function, rule, host or the end of its path."""
    if target.startswith(("http://", "https://")):
        host = re.sub(r"^https?://([^@/]*@)?", "", target.split(",")[0]).partition("/")[0]
        return re.sub(r"[^\w.-]+", "-", host) or "server"
    last = target.rstrip("/").rpartition(":" if FUNCTION.fullmatch(target) else "/")[2]
    return re.sub(r"[^\w.+-]+", "-", last)


def _calls(
    spec: RewardSettings,
    name: str,
    where: str,
    model: ModelReward | None,
    function: FunctionBackend | None,
) -> Calls:
    if spec.clip is not None and not spec.clip[0] <= spec.clip[1]:
        what = f"nothing is at least {spec.clip[0]:g} and at most {spec.clip[1]:g}"
        raise UserError(
            what,
            code="reward-setting-value",
            where=f"{where}.clip",
            fix="put the smaller number first",
        )
    backend, always, together = _backend(spec, where, model, function)
    return Calls(
        name,
        backend,
        spec.deterministic or always,
        batch_size=spec.batch_size,
        retries=spec.retries,
        concurrency=spec.concurrency if together else 1,
        patience=MAX_TIMEOUTS * spec.timeout,
    )


def _backend(
    spec: RewardSettings, where: str, model: ModelReward | None, function: FunctionBackend | None
) -> tuple[CallBackend, bool, bool]:
    """The backend, whether it is deterministic by nature, and whether calls may overlap."""
    target, settings = spec.reward, spec.settings
    place = f"{where}.settings"
    if is_server(target):
        return _servers(spec, where), False, True
    if spec.token_env is not None:
        raise UserError(
            "only servers take a token",
            code="reward-setting-unused",
            where=f"{where}.token_env",
            fix="remove it",
        )
    if target in RULES:
        return Rules(target, rule_of(target, settings, place), settings, spec.timeout), True, False
    if is_function(target):
        if function is not None:
            return function(spec, f"{where}.reward"), False, True
        made = function_of(target, settings, spec.timeout, where)
        return made, False, not made.blocking
    _check_model(target, f"{where}.reward", model)
    assert model is not None
    return model(target, settings, where), True, False


def _servers(spec: RewardSettings, where: str) -> Servers:
    unknown = sorted(spec.settings.keys() - {"label"})
    if unknown or not isinstance(spec.settings.get("label", ""), str):
        setting = unknown[0] if unknown else "label"
        raise UserError(
            f"the client of a server has no setting {setting!r}"
            if unknown
            else "it names a column",
            code="reward-setting-unknown" if unknown else "reward-setting-value",
            where=f"{where}.settings.{setting}",
            fix="its one setting is label, the column of the rows that is sent as label",
        )
    token = None
    if spec.token_env is not None:
        token = os.environ.get(spec.token_env)
        if not token:
            what = f"the environment has no variable {spec.token_env}"
            raise UserError(
                what,
                code="environment-variable-missing",
                where=f"{where}.token_env",
                fix="set it to the server's token",
            )
    urls = parse_addresses(spec.reward, f"{where}.reward")
    return Servers(urls, spec.timeout, spec.settings.get("label"), token)


def _check_model(target: str, where: str, model: ModelReward | None) -> None:
    """Raises UserError for what is meant as something other than a model."""
    path = Path(target)
    if path.is_dir() and model is not None:
        return
    place = f"{where}: {target}"
    if path.is_file() or OF_A_FILE.search(target):
        function = (
            f"{path.with_suffix('').as_posix().replace('/', '.').partition('.py:')[0]}:function"
        )
        raise UserError(
            "this is a file",
            code="reward-not-found",
            where=place,
            fix=f"name a function in it as {function}, or {KINDS}",
        )
    if HOST.fullmatch(target):
        raise UserError(
            "this is an address without its scheme",
            code="reward-not-found",
            where=place,
            fix=f"write http://{target}",
        )
    near = get_close_matches(target, RULES, 1, 0.7)
    if near:
        raise UserError(
            "there is no rule of this name",
            code="reward-not-found",
            where=place,
            fix=f"did you mean {near[0]}? Else name {KINDS}",
        )
    if DOTTED.fullmatch(target):
        package, _, last = target.rpartition(".")
        raise UserError(
            "this names no reward",
            code="reward-not-found",
            where=place,
            fix=f"write {package}:{last} for a function; name {KINDS}",
        )
    if model is None:
        raise UserError(
            "reward models cannot be used here",
            code="reward-model-unsupported",
            where=place,
            fix=f"name {KINDS}",
        )
