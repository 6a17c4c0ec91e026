"""Scores that are kept: the same completion is judged once by a reward that always gives the
same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valence.checksums import add_checksum, verify
from valence.errors import UserError
from valence.files import make_folder, open_file
from valence.rewards.calls import Calls
from valence.types import Completion, Score
from valence.version import __version__

HEAD = "scores of"
"""In the first line of a file: what the scores depend on besides the completions."""
MOST = 2**16
"""Scores that are held in memory, of one reward: about 32 MB where each has one part."""


class Kept:
    """Scores by key, in memory and, with a folder, in a file that only grows, which several
    processes may share.

    most: scores held in memory; beyond, those that were not used for longest leave it. From a file
    the last ones are read, and one that has left the memory counts as unknown: its completion is
    scored again, which costs a call and gives the same.

    A line is one score with its checksum. A damaged line counts as absent, with one warning that
    names the first. What a killed process left of its last line is ignored, as every write begins
    with a line break. Scores whose writing fails are kept in memory alone, and ``trouble`` says so.
    """

    def __init__(self, folder: Path | None, identity: Mapping[str, Any], most: int = MOST) -> None:
        self.most = most
        self.path = None if folder is None else folder / f"{digest(identity)}.jsonl"
        self.trouble = ""
        self._scores = OrderedDict[str, Score]()
        self._read = self._lines = 0
        self._warned = False
        if self.path is not None:
            try:
                make_folder(self.path.parent, self.path.parent.parent)
                if not self.path.exists():
                    about = {HEAD: identity, "by": f"valence {__version__}"}
                    self._append(json.dumps(add_checksum(about)))
            except OSError as error:
                what = f"scores cannot be kept here ({error.strerror})"
                raise UserError(
                    what,
                    code="reward-cache-not-writable",
                    where=str(self.path.parent),
                    fix="make room, or name another folder",
                ) from error
            self.refresh()

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: str) -> Score | None:
        found = self._scores.get(key)
        if found is not None:
            self._scores.move_to_end(key)
        return found

    def add(self, scores: Mapping[str, Score]) -> None:
        """Those that have failed are not kept: the next time they may not."""
        good = {
            key: score
            for key, score in scores.items()
            if score.value is not None and key not in self._scores
        }
        for key, score in good.items():
            self._hold(key, score)
        if not good or self.path is None:
            return
        entries = [
            {"key": key, "value": s.value, "parts": dict(s.parts)} for key, s in good.items()
        ]
        lines = [json.dumps(add_checksum(entry)) for entry in entries]
        try:
            self._append("\n".join(lines))
        except OSError as error:
            if not self.trouble:
                self.trouble = (
                    f"{self.path}: scores cannot be written ({error.strerror}); they "
                    f"are kept in memory"
                )
                warnings.warn(self.trouble, stacklevel=2)

    def refresh(self) -> None:
        """Takes in what was added to the file, by this process or another, up to its last whole
        line.
        """
        if self.path is None:
            return
        # moved away: what is in memory stays
        with (
            contextlib.suppress(OSError),
            self.path.open("rb") as file,
        ):
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                self._lines += 1
                try:
                    found = _entry(line)
                except ValueError:
                    self._warn_of_damage()
                    continue
                if found is not None and found[0] not in self._scores:
                    self._hold(*found)

    def _warn_of_damage(self) -> None:
        if not self._warned:
            warnings.warn(
                f"{self.path}:{self._lines}: this line is damaged (its checksum is wrong); its "
                f"score is computed again",
                stacklevel=4,
            )
        self._warned = True

    def _hold(self, key: str, score: Score) -> None:
        self._scores[key] = score
        if len(self._scores) > self.most:
            self._scores.popitem(last=False)

    def _append(self, text: str) -> None:
        """In one write, so that lines of several processes do not mix."""
        assert self.path is not None
        with open_file(self.path, self.path.parent, append=True) as file:
            file.write(f"\n{text}\n".encode())


@dataclass
class Cached:
    """A reward whose scores are looked up first."""

    inner: Calls
    kept: Kept
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
        keys = [key_of(completion) for completion in completions]
        if any(key is not None and self.kept.get(key) is None for key in keys):
            self.kept.refresh()
        found = {
            key: score
            for key in keys
            if key is not None and (score := self.kept.get(key)) is not None
        }
        asked: dict[str | int, Completion] = {}  # once each; without a key under its place
        for i, (key, completion) in enumerate(zip(keys, completions, strict=True)):
            if key not in found:
                asked.setdefault(i if key is None else key, completion)
        self.hits += len(completions) - len(asked)
        self.misses += len(asked)
        new = dict(zip(asked, await self.inner(list(asked.values())) if asked else [], strict=True))
        self.kept.add({key: score for key, score in new.items() if isinstance(key, str)})
        every = {**new, **found}
        return [every[i if key is None else key] for i, key in enumerate(keys)]

    async def close(self) -> None:
        await self.inner.close()


def key_of(completion: Completion) -> str | None:
    """A hash of all that a reward may read of a completion, short of who sampled it and when; None
    when JSON does not hold it.
    """
    read = {
        "prompt": completion.prompt,
        "rendered": completion.rendered,
        "tokens": completion.tokens,
        "text": completion.text,
        "stop": completion.stop,
        "info": completion.info,
        **({"tools": completion.tools} if completion.tools else {}),
    }
    try:
        return digest(read)
    except (TypeError, ValueError, RecursionError):
        return None


def digest(value: Any) -> str:
    """32 hexadecimal digits of a value's JSON. Raises TypeError or ValueError when it has none."""
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def _entry(line: bytes) -> tuple[str, Score] | None:
    """Key and score of a line; None for the head of the file, an empty line, and one that a killed
    process did not finish. Raises ValueError for a line that is damaged.
    """
    if not line.rstrip().endswith(b"}"):
        return None
    try:
        found = verify(json.loads(line), required=True)
        if HEAD in found:
            return None
        key, value, parts = found["key"], found["value"], found["parts"]
        numbers = [value, *parts.values()]
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, str) or not all(
        type(n) in (int, float) and math.isfinite(n) for n in numbers
    ):
        raise ValueError("not a score")
    return key, Score(value, parts)
