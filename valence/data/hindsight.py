"""What the teacher of a self-distillation reads: the prompt with the feedback on its answer.

The teacher is the same model as the policy, and reads what the policy cannot know yet: what the
user wrote after the answer (Kleine Buening et al. 2026, arXiv 2603.12273), or a good answer
(Shenfeld et al. 2026, arXiv 2601.19897).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from valence.types import Chat

Context = Literal["feedback", "demonstration"]
FIELD = "{feedback}"

TEMPLATES: dict[tuple[Context, bool | None], str] = {
    ("feedback", None): 'The user replied to an earlier answer: "{feedback}"',
    ("feedback", True): 'The user liked an earlier answer and wrote: "{feedback}"',
    ("feedback", False): 'The user did not like an earlier answer and wrote: "{feedback}"',
    ("demonstration", None): (
        "This is an example of a good answer to this message:\n\n{feedback}\n\n"
        "Answer the message in your own words."
    ),
}
"""The default templates, by context and label of the row."""


@dataclass(frozen=True)
class TeacherContext:
    """How the feedback enters the prompt. template: with ``{feedback}``; None: the default."""

    context: Context = "feedback"
    template: str | None = None

    def text(self, feedback: str, label: bool | None) -> str:
        """What the teacher reads after the prompt."""
        default = TEMPLATES.get((self.context, label)) or TEMPLATES[self.context, None]
        return (self.template or default).replace(FIELD, feedback)

    def prompt(self, prompt: Chat | str, feedback: str, label: bool | None) -> Chat | str:
        """The prompt of the teacher: the text at the end of the last user turn of a chat, or before
        a prompt that is rendered as it is.
        """
        text = self.text(feedback, label)
        if isinstance(prompt, str):
            return f"{text}\n\n{prompt}"
        messages = list(prompt.messages)
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        messages[last] = _with_text(messages[last], text)
        return Chat(tuple(messages), prompt.tools)


def _with_text(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}\n\n{text}"}
