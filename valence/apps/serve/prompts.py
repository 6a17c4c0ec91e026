"""A queue of prompts that raters work through."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from valence.data.load import DataFile, load
from valence.types import Chat, Message, Prompt, content_id


def prompt_id(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Identifies a prompt by its content."""
    turns = [dict(message) for message in messages]
    return content_id(turns, [dict(tool) for tool in tools]) if tools else content_id(turns)


class PromptQueue:
    """Gives each rater the prompts of some files, in their order.

    A prompt is done when the rater has voted on an answer to it, also before a restart, or has
    skipped it.

    Raises UserError for a file without prompts.
    """

    def __init__(self, files: Sequence[str]) -> None:
        examples = load([DataFile(path) for path in files], "prompt").examples if files else ()
        prompts = [example.prompt for example in examples if isinstance(example, Prompt)]
        self.prompts = [
            prompt if isinstance(prompt, Chat) else Chat(({"role": "user", "content": prompt},))
            for prompt in prompts
        ]
        self._infos = [example.info for example in examples if isinstance(example, Prompt)]
        self._ids = [prompt_id(chat.messages, chat.tools) for chat in self.prompts]
        self._skipped: dict[str, set[int]] = defaultdict(set)

    def info(self, number: int | None) -> Mapping[str, Any]:
        """The other columns of a prompt's row, by the number of the prompt."""
        return self._infos[number - 1] if number and 1 <= number <= len(self._infos) else {}

    def next(
        self,
        rater: str,
        has_voted: Callable[[str, str], bool] = lambda *_: False,
        *,
        skip: int | None = None,
    ) -> tuple[int, Chat] | None:
        """The number of the rater's next prompt, from 1, and the prompt; None after the last.

        has_voted: whether a rater has voted on an answer to the prompt with this id. skip: number
        of a prompt that the rater skips.
        """
        skipped = self._skipped[rater]
        if skip is not None and 1 <= skip <= len(self.prompts):
            skipped.add(skip)
        for number, (id, prompt) in enumerate(zip(self._ids, self.prompts, strict=True), 1):
            if number not in skipped and not has_voted(rater, id):
                return number, prompt
        return None
