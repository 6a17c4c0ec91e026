"""The interface of all sources of completions, in this process or on a server."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from valence.errors import UserError
from valence.types import Completion

if TYPE_CHECKING:
    from torch import Tensor


MAX_TOKENS = 2**20
"""Maximum of ``max_new_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. Raises UserError when a value is out of range."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    max_new_tokens: int = 128
    """Maximum tokens of a completion, including its end token."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with at least this total probability."""
    seed: int = 0
    """The same seed gives the same completions."""

    def __post_init__(self) -> None:
        for name, is_valid, fix in (
            (
                "temperature",
                math.isfinite(self.temperature) and self.temperature >= 0,
                "use 0 or a positive number",
            ),
            (
                "max_new_tokens",
                1 <= self.max_new_tokens <= MAX_TOKENS,
                f"use a number from 1 to {MAX_TOKENS}",
            ),
            ("seed", 0 <= self.seed < 2**63, "use an integer from 0 to 2**63 - 1"),
            ("top_p", 0 < self.top_p <= 1, "use a number above 0 and at most 1"),
        ):
            if not is_valid:
                raise UserError(
                    f"the value {getattr(self, name)} is not allowed",
                    code="sampling-value",
                    where=name,
                    fix=fix,
                )


Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a prompt, and of a completion."""

Named = Iterable[tuple[str, "Tensor"]]
"""Weights with their names in a saved model."""


def check_request(prompts: Sequence[Sequence[int]], n: int, first: int = 0) -> None:
    """Raise UserError unless n is positive and all prompts have tokens.

    first: the number of the first prompt, for messages.
    """
    if n < 1:
        raise UserError(
            f"cannot sample {n} answers per prompt",
            code="sampling-value",
            where="n",
            fix="use at least 1",
        )
    for number, prompt in enumerate(prompts, first):
        if not prompt:
            raise UserError(
                "the prompt has no tokens",
                code="prompt-empty",
                where=f"prompt {number}",
                fix="remove empty prompts",
            )


def completion_seed(seed: int, position: int | str) -> int:
    """The seed of the first completion of a prompt; that of the completion at index i is this + i.

    The seeds of different prompts are far apart.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{position}".encode()).digest()[:8]) >> 2


class TurnByTurn(Protocol):
    """A completion that is sampled turn by turn. position, index: see ``completion_seed``."""

    position: int
    index: int
    num_turns: int

    @property
    def context(self) -> list[int]:
        """The tokens before the next turn."""
        ...

    @property
    def num_left(self) -> int:
        """How many tokens may follow."""
        ...

    async def start(self) -> bool:
        """Prepare it. Returns whether a turn is to be sampled."""
        ...

    async def take_turn(
        self, tokens: Sequence[int], logps: Sequence[float], versions: Sequence[int] = ()
    ) -> bool:
        """Add a turn. Returns whether another one is to be sampled."""
        ...

    async def close(self) -> None: ...


def turn_seed(seed: int, item: TurnByTurn) -> int:
    """The seed of the next turn on a server."""
    return completion_seed(seed, f"{item.position}/{item.index}/{item.num_turns}")


def ignore_progress(num_completions: int) -> None:
    """The default of ``progress``."""


class Generator(Protocol):
    """Samples completions of token prompts."""

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = ignore_progress,
    ) -> list[list[Completion]]:
        """n completions of each prompt, in the order of the prompts.

        ``progress`` is called in this thread with the number of completions that ended since its
        last call.
        """
        ...


class Served(Generator, Protocol):
    """A server that samples with its own copy of the weights, from the last ``sync``."""

    @property
    def version(self) -> int:
        """The version of the weights that were sent last."""
        ...

    @property
    def gives_tokens(self) -> bool:
        """Whether completions have token ids and log-probabilities, as policy gradients need."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the server's weights, as torch names it; empty if unknown."""
        ...

    def sync(
        self,
        version: int,
        weights: Callable[[], Named],
        adapter: Callable[[Path], None] | None = None,
    ) -> None:
        """Send new weights; later completions carry ``version``.

        weights: unused if the adapter is sent. A transport without copies of the weights calls it
        again if the server lost them, up to the next ``sync``. adapter: writes the adapter's files
        into a folder. Raises UserError if the server does not accept them.
        """
        ...

    def logps(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """The server's log-probability of each token (nats), at temperature 1."""
        ...

    def close(self) -> None:
        """Close connections and remove folders. The server keeps running."""
        ...
