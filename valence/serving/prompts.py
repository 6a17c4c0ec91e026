"""A queue of prompts that raters work through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from valence.data.load import DataFile, load
from valence.types import Chat, Message, Prompt


class PromptQueue:
    """Gives each rater the prompts of some files, one after the other.

    All raters get all prompts, in the order of the files.
    """

    def __init__(self, files: Sequence[str]) -> None:
        """Raises UserError for a file without prompts."""
        examples = load([DataFile(path) for path in files], "prompt").examples if files else ()
        self.prompts: list[tuple[Message, ...]] = [
            example.prompt.messages
            if isinstance(example.prompt, Chat)
            else ({"role": "user", "content": str(example.prompt)},)
            for example in examples
            if isinstance(example, Prompt)
        ]
        self._next: dict[str, int] = defaultdict(int)

    def next(self, rater: str) -> tuple[int, tuple[Message, ...]] | None:
        """The number of the rater's next prompt, from 1, and its messages; None after the last."""
        number = self._next[rater]
        if number >= len(self.prompts):
            return None
        self._next[rater] = number + 1
        return number + 1, self.prompts[number]
