"""What every source of completions offers, whether it samples in this process or asks a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from valence.errors import UserError
from valence.types import Completion

if TYPE_CHECKING:
    from torch import Tensor


LONGEST = 2**20
"""Tokens of an answer that may be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Raises UserError when a value is out of range."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    max_new_tokens: int = 128
    """Longest answer, its end token included."""
    top_p: float = 1.0
    """Draw only from the smallest set of most likely tokens whose probability reaches this."""
    seed: int = 0
    """The same seed gives the same answers."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(
                f"it is {self.temperature}",
                code="sampling-value",
                where="temperature",
                fix="use 0 or a positive number",
            )
        if not 1 <= self.max_new_tokens <= LONGEST:
            raise UserError(
                f"it is {self.max_new_tokens}",
                code="sampling-value",
                where="max_new_tokens",
                fix=f"allow at least 1 token and at most {LONGEST}",
            )
        if not 0 <= self.seed < 2**63:
            raise UserError(
                f"it is {self.seed}",
                code="sampling-value",
                where="seed",
                fix="use a whole number from 0 to below 2**63",
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"it is {self.top_p}",
                code="sampling-value",
                where="top_p",
                fix="use a number above 0 and at most 1",
            )


Pair = tuple[Sequence[int], Sequence[int]]
"""A prompt's tokens, and an answer's."""

Named = Iterable[tuple[str, "Tensor"]]
"""Weights under the names that they have in a saved model."""


def check_request(prompts: Sequence[Sequence[int]], n: int, first: int = 0) -> None:
    """Raise UserError unless at least one answer to each of some non-empty prompts is asked for.

    first: the number of the first prompt, for messages.
    """
    if n < 1:
        raise UserError(
            f"{n} answers per prompt", code="sampling-value", where="n", fix="ask for at least 1"
        )
    for number, prompt in enumerate(prompts, first):
        if not prompt:
            raise UserError(
                "the prompt has no tokens",
                code="prompt-empty",
                where=f"prompt {number}",
                fix="leave empty prompts out",
            )


def unheard(answers: int) -> None:
    """Who asks for no progress hears nothing of it."""


class Generator(Protocol):
    """Samples completions of token prompts."""

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        progress: Callable[[int], None] = unheard,
    ) -> list[list[Completion]]:
        """n completions of each prompt, in the order of the prompts.

        ``progress`` hears, in this thread, of so many answers that ended since it was last called.
        """
        ...


class Served(Generator, Protocol):
    """A server that samples. It has weights of its own, which are as old as the last ``sync``."""

    @property
    def version(self) -> int:
        """Of the weights that were sent last."""
        ...

    @property
    def gives_tokens(self) -> bool:
        """Whether completions have token ids and log-probabilities, as policy gradients need."""
        ...

    @property
    def dtype(self) -> str:
        """Of the server's weights, as torch names it; empty where it is not known."""
        ...

    def sync(
        self,
        version: int,
        weights: Callable[[], Named],
        adapter: Callable[[Path], None] | None = None,
    ) -> None:
        """Sends new weights; completions from now on carry ``version``.

        weights: called at most once, and iterated to its end before this returns; unused where
        ``adapter`` is what is sent.
        adapter: writes the adapter's files into the folder it is given. Raises UserError where it
        cannot be done.
        """
        ...

    def logps(self, pairs: Sequence[Pair]) -> list[list[float]]:
        """The server's log-probability of each token of each answer (nats), at temperature 1."""
        ...

    def close(self) -> None:
        """Gives back connections and folders. The server goes on."""
        ...
