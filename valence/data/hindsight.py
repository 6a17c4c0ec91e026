"""What the teacher of a self-distillation reads: the prompt with the feedback on its answer.

The teacher is the same model as the policy, and reads what the policy cannot know yet: what the
user wrote after the answer (Kleine Buening et al. 2026, arXiv 2603.12273), a good answer (Shenfeld
et al. 2026, arXiv 2601.19897), or what a reward says about a sampled answer (Hübotter et al. 2026,
arXiv 2601.20802).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from valence.types import Chat

Context = Literal["feedback", "demonstration", "either"]
TextSource = Literal["feedback", "reward", "demonstration"]
"""Who wrote the text that the teacher reads: the user, a reward, or the author of an answer."""
FIELD = "{feedback}"

TEMPLATES: dict[tuple[TextSource, bool | None], str] = {
    ("feedback", None): 'The user replied to an earlier answer: "{feedback}"',
    ("feedback", True): 'The user liked an earlier answer and wrote: "{feedback}"',
    ("feedback", False): 'The user did not like an earlier answer and wrote: "{feedback}"',
    ("reward", None): "An earlier answer was checked, with this result:\n\n{feedback}",
    ("demonstration", None): (
        "This is an example of a good answer to this message:\n\n{feedback}\n\n"
        "Answer the message in your own words."
    ),
}
"""The default templates, by the source of the text and the label of the row."""


@dataclass(frozen=True)
class TeacherContext:
    """How the feedback enters the prompt.

    context: see ``teacher.context``. template: with ``{feedback}``; None: the default.
    """

    context: Context = "feedback"
    template: str | None = None

    @property
    def source_of_rows(self) -> TextSource:
        """The source of the column `feedback` of stored rows."""
        return "demonstration" if self.context == "demonstration" else "feedback"

    def text(self, feedback: str, label: bool | None, source: TextSource | None = None) -> str:
        """The text that the teacher reads after the prompt. source: None for a stored row."""
        source = source or self.source_of_rows
        default = TEMPLATES.get((source, label)) or TEMPLATES[source, None]
        return (self.template or default).replace(FIELD, feedback)

    def select(
        self, rewards: Sequence[float], feedback: Sequence[str], answers: Sequence[str]
    ) -> list[tuple[str, TextSource] | None]:
        """The text that the teacher of each sampled answer to a prompt reads; None without one.

        The text is that of the reward, or the best answer if its reward is larger. Among equal
        rewards, the answer sampled first is the best one.
        """
        best = max(range(len(rewards)), key=lambda i: rewards[i])
        texts: list[tuple[str, TextSource] | None] = []
        for reward, text in zip(rewards, feedback, strict=True):
            if text and self.context != "demonstration":
                texts.append((text, "reward"))
            elif self.context != "feedback" and reward < rewards[best] and answers[best].strip():
                texts.append((answers[best].strip(), "demonstration"))
            else:
                texts.append(None)
        return texts

    def prompt(
        self, prompt: Chat | str, feedback: str, label: bool | None,
        source: TextSource | None = None,
    ) -> Chat | str:  # fmt: skip
        """The prompt of the teacher: the text at the end of the last user turn of a chat, or before
        a prompt that is rendered as it is.
        """
        text = self.text(feedback, label, source)
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
