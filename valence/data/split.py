"""Hold out a share of the rows by their prompts, so that no prompt is on both sides."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from valence.errors import UserError
from valence.types import Chat, Content, Ids, Message, content_id

ROUND_SHARES = tuple(n / 100 for n in range(1, 100))
"""Shares to suggest."""
MIN_HELD_OUT = 2
"""KTO compares each row with a row of another prompt, also among the rows that are held out."""


def prompt_key(prompt: Content) -> str:
    """The same for all prompts with the same content: a text is a chat of one user message."""
    prompt = _readable(prompt)
    tools = prompt.tools if isinstance(prompt, Chat) else ()
    return content_id(_turns(prompt), [dict(tool) for tool in tools])


def opening_key(prompt: Content) -> str:
    """The same for all prompts of a conversation: its turns up to the first user message."""
    turns = _turns(_readable(prompt))
    if isinstance(turns, Ids):
        return content_id(turns)
    first = next((i for i, turn in enumerate(turns) if turn.get("role") == "user"), len(turns))
    return content_id(turns[: first + 1])


def _readable(prompt: Content) -> Content:
    return prompt.readable or prompt if isinstance(prompt, Ids) else prompt


def _turns(prompt: Content) -> list[Message] | Ids:
    if isinstance(prompt, Ids):
        return prompt
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt.messages]


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """Decides by a hash of the prompt and the seed whether rows are held out.

    All prompts of a conversation are on the same side. The side of a prompt depends on no other
    row, so it stays when rows are added. The share of the prompts is therefore approximate.

    share: between 0 and 1.
    """

    share: float
    seed: int = 0

    def position(self, prompt: Content) -> float:
        """A number of at least 0 and below 1. The prompt is held out if it is below the share."""
        digest = hashlib.sha256(f"{self.seed} {opening_key(prompt)}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    def is_held_out(self, prompt: Content) -> bool:
        return self.position(prompt) < self.share

    def nearest_share(self, positions: Iterable[float]) -> float | None:
        """The share itself if it holds out at least two of the prompts with these positions, and
        leaves one; else the nearest share that does. None if there are fewer than three.
        """
        different = sorted(set(positions))
        if len(different) < MIN_HELD_OUT + 1:
            return None
        low, high = different[MIN_HELD_OUT - 1], different[-1]
        shares = [share for share in (self.share, *ROUND_SHARES) if low < share <= high]
        return min(shares, key=lambda share: abs(share - self.share), default=(low + high) / 2)

    def check(self, positions: Collection[float], where: str) -> None:
        """Raise UserError if too few of the prompts with these positions are held out, or none
        remain. where: the setting of the share.
        """
        share = self.nearest_share(positions)
        if share == self.share:
            return
        different = set(positions)
        num_held_out = sum(position < self.share for position in different)
        raise UserError(
            f"a share of {self.share:g} holds out {num_held_out} of {len(different)} different "
            f"prompts, but must hold out at least {MIN_HELD_OUT} and leave 1",
            code="split-too-small",
            where=where,
            fix=("" if share is None else f"set it to {share:g}, or ")
            + "add rows with other prompts",
        )


__all__ = ["PromptSplit", "opening_key", "prompt_key"]
