"""A queue of prompts that raters work through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from valence.data.load import DataFile, load
from valence.types import Chat, Message, Prompt, content_id


def prompt_id(messages: Sequence[Message]) -> str:
    """Identifies a prompt by its content."""
    return content_id([dict(message) for message in messages])


class PromptQueue:
    """Gives each rater the prompts of some files, in their order.

    A prompt is done when the rater has voted on an answer to it, also before a restart, or has
    skipped it.
    """

    def __init__(
        self, files: Sequence[str], has_voted: Callable[[str, str], bool] = lambda *_: False
    ) -> None:
        """has_voted: whether a rater has voted on an answer to the prompt with this id.

        Raises UserError for a file without prompts.
        """
        examples = load([DataFile(path) for path in files], "prompt").examples if files else ()
        self.prompts: list[tuple[Message, ...]] = [
            example.prompt.messages
            if isinstance(example.prompt, Chat)
            else ({"role": "user", "content": str(example.prompt)},)
            for example in examples
            if isinstance(example, Prompt)
        ]
        self._ids = [prompt_id(messages) for messages in self.prompts]
        self._has_voted = has_voted
        self._skipped: dict[str, set[int]] = defaultdict(set)

    def next(self, rater: str, skip: int | None = None) -> tuple[int, tuple[Message, ...]] | None:
        """The number of the rater's next prompt, from 1, and its messages; None after the last.

        skip: number of a prompt that the rater does not want to rate.
        """
        if skip is not None:
            self._skipped[rater].add(skip)
        for number, (id, messages) in enumerate(zip(self._ids, self.prompts, strict=True), 1):
            if number not in self._skipped[rater] and not self._has_voted(rater, id):
                return number, messages
        return None
