"""Cache of scores: a deterministic reward scores each completion once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from valence.errors import UserError
from valence.rewards.calls import Calls
from valence.storage import SharedJournal, make_folder
from valence.types import Completion, Score
from valence.version import __version__

T = TypeVar("T")
HEADER = "scores of"
"""Key of the first line of a file: everything that scores depend on besides the completions."""
MAX_SCORES = 2**16
"""Maximum number of scores of a reward in memory: about 32 MB if each has one part."""


class SharedLines(Generic[T]):
    """A file of results that several processes share; the first line says what they depend on.

    A damaged line counts as absent, with one warning for the first. If writing fails, ``trouble``
    says why. parse: raises ValueError for another line. noun: what the lines are, for messages.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        noun: str,
        parse: Callable[[Mapping[str, Any]], T],
    ) -> None:
        self.path, self.noun, self.trouble = path, noun, ""
        self._warned = False
        self._journal = SharedJournal(
            path, lambda entry: None if HEADER in entry else parse(entry), self._warn_of_damage
        )
        try:
            make_folder(path.parent, path.parent.parent)
            if not path.exists():
                self._journal.append({HEADER: identity, "by": f"valence {__version__}"})
        except OSError as error:
            raise UserError(
                f"the cache of {noun} cannot be written ({error.strerror})",
                code="reward-cache-not-writable",
                where=str(path.parent),
                fix="free disk space, or choose another folder",
            ) from error

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        try:
            self._journal.append(*entries)
        except OSError as error:
            if not self.trouble:
                self.trouble = (
                    f"{self.path}: {self.noun} cannot be written ({error.strerror}); they are "
                    f"only cached in memory"
                )
                warnings.warn(self.trouble, stacklevel=3)

    def read_new(self) -> Iterator[T]:
        """The results that this process or another has appended since the last call."""
        # if the file was moved, keep the entries in memory
        with contextlib.suppress(OSError):
            for result in self._journal.read_new():
                if result is not None:
                    yield result

    def _warn_of_damage(self, number: int, error: Exception) -> None:
        if not self._warned:
            warnings.warn(
                f"{self.path}:{number}: the line is damaged; its scores are computed again",
                stacklevel=5,
            )
        self._warned = True


class ScoreCache:
    """Scores by key, in memory and, with a folder, in a file (``SharedLines``).

    max_scores: scores in memory; the least recently used ones are evicted. An evicted completion is
    scored again, with the same result. If writing fails, scores stay in memory.
    """

    def __init__(
        self, folder: Path | None, identity: Mapping[str, Any], max_scores: int = MAX_SCORES
    ) -> None:
        self.folder, self.identity, self.max_scores = folder, identity, max_scores
        self.path = None if folder is None else folder / f"{digest(identity)}.jsonl"
        self._lines = (
            None if self.path is None else SharedLines(self.path, identity, "scores", _parse_score)
        )
        self._scores = OrderedDict[str, Score]()
        self.refresh()

    @property
    def trouble(self) -> str:
        """Why scores cannot be written; "" if they can."""
        return "" if self._lines is None else self._lines.trouble

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: str) -> Score | None:
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def add(self, scores: Mapping[str, Score]) -> None:
        """Failed scores are not cached: they may succeed the next time."""
        new = {
            key: score
            for key, score in scores.items()
            if score.value is not None and key not in self._scores
        }
        for key, score in new.items():
            self._insert(key, score)
        if new and self._lines is not None:
            self._lines.append(
                {"key": key, "value": s.value, "parts": dict(s.parts)}
                | ({"feedback": s.feedback} if s.feedback else {})
                | ({"turns": list(s.turn_rewards)} if s.turn_rewards else {})
                for key, s in new.items()
            )

    def refresh(self) -> None:
        """Read the scores that were added to the file, by this process or another."""
        if self._lines is None:
            return
        for key, score in self._lines.read_new():
            if key not in self._scores:
                self._insert(key, score)

    def _insert(self, key: str, score: Score) -> None:
        self._scores[key] = score
        if len(self._scores) > self.max_scores:
            self._scores.popitem(last=False)


@dataclass
class CachedReward:
    """A reward with a cache, which starts again when the reward's identity changes."""

    inner: Calls
    cache: ScoreCache
    hits: int = 0
    misses: int = 0
    batch_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.batch_size = self.inner.batch_size

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def deterministic(self) -> bool:
        return self.inner.deterministic

    async def __call__(self, completions: Sequence[Completion]) -> list[Score]:
        identity = self.inner.backend.identity
        if identity is None:
            return await self.inner(completions)
        if identity != self.cache.identity:
            self.cache = ScoreCache(self.cache.folder, identity, self.cache.max_scores)
        keys = [cache_key(completion) for completion in completions]
        if any(key is not None and self.cache.get(key) is None for key in keys):
            self.cache.refresh()
        scores: dict[str | int, Score] = {}
        missing: dict[str | int, Completion] = {}  # once per key, or by index without a key
        for i, (key, completion) in enumerate(zip(keys, completions, strict=True)):
            score = None if key is None else self.cache.get(key)
            if key is not None and score is not None:
                scores[key] = score
            else:
                missing.setdefault(i if key is None else key, completion)
        self.hits += len(completions) - len(missing)
        self.misses += len(missing)
        if missing:
            new = dict(zip(missing, await self.inner(list(missing.values())), strict=True))
            if self.inner.backend.identity == identity:
                self.cache.add({key: score for key, score in new.items() if isinstance(key, str)})
            scores |= new
        return [scores[i if key is None else key] for i, key in enumerate(keys)]

    async def close(self) -> None:
        await self.inner.close()


def cache_key(completion: Completion) -> str | None:
    """A hash of everything in a completion that a reward may read; None if it is not JSON."""
    episode = completion.episode
    content = {
        "prompt": completion.prompt,
        "rendered": completion.rendered,
        "tokens": completion.tokens,
        "text": completion.text,
        "stop": completion.stop,
        "info": completion.info,
        **({"tools": completion.tools} if completion.tools else {}),
        **({"turns": [episode.messages, episode.reward, *episode.turn_rewards]} if episode else {}),
    }
    try:
        return digest(content)
    except (TypeError, ValueError, RecursionError):
        return None


def digest(value: Any) -> str:
    """32 hexadecimal digits of a value's JSON. Raises TypeError or ValueError if it has none."""
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _parse_score(entry: Mapping[str, Any]) -> tuple[str, Score]:
    """Key and score of a line. Raises ValueError for another one."""
    try:
        key, value, parts = entry["key"], entry["value"], entry["parts"]
        feedback, turns = entry.get("feedback", ""), entry.get("turns", [])
        numbers = [value, *parts.values(), *turns]
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(str(error)) from error
    is_finite = all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
    if not (isinstance(key, str) and isinstance(feedback, str) and is_finite):
        raise ValueError("not a score")
    return key, Score(value, parts, feedback=feedback, turn_rewards=tuple(turns))
