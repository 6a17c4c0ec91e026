"""Write an Ollama Modelfile that renders prompts as the run's chat template does.

Ollama does not run the Jinja template of a GGUF file. It renders prompts with a template in Go's
language, which it guesses from the Jinja template unless the Modelfile contains one. The Go
template here is derived from what the run's template prints around each turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valence.data.encode import Encoder
from valence.data.template import ChatTemplate
from valence.data.vocab import RowError
from valence.types import Message

_TEXTS = ("alphaone", "betatwo", "gammathree", "deltafour", "epsilonfive")


@dataclass(frozen=True)
class TurnTexts:
    """What a chat template prints around the turns of a conversation.

    start: before the first turn if there is no system message, such as a default system message.
    before_*, after_*: around a turn of this role. first_user: before the user turn that follows a
    system message; None if the template has no system messages. ask: the generation prompt.
    """

    start: str
    before_system: str
    after_system: str
    first_user: str | None
    before_user: str
    after_user: str
    before_assistant: str
    after_assistant: str
    ask: str

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as the Go template renders it."""
        has_system = messages[0]["role"] == "system"
        text = "" if has_system else self.start
        for i, message in enumerate(messages):
            content = str(message["content"])
            if message["role"] == "system":
                text += self.before_system + content + self.after_system
            elif message["role"] == "user":
                before = self.first_user if has_system and i == 1 else self.before_user
                text += f"{before}{content}{self.after_user}"
            else:
                text += f"{self.before_assistant}{content}{self.after_assistant}"
        return text + self.ask

    def go_template(self) -> str:
        """The template in Go's language, as Ollama reads it."""
        user = f"{_literal(self.before_user)}{{{{ .Content }}}}{_literal(self.after_user)}"
        system = ""
        if self.first_user is not None:
            first = _literal(self.first_user)
            system = (
                f'{{{{ if eq .Role "system" }}}}{_literal(self.before_system)}{{{{ .Content }}}}'
                f"{_literal(self.after_system)}{{{{ else }}}}"
            )
            before = _literal(self.before_user)
            if first != before:
                user = (
                    f"{{{{ if and $.System (eq $i 1) }}}}{first}{{{{ else }}}}{before}{{{{ end }}}}"
                    f"{{{{ .Content }}}}{_literal(self.after_user)}"
                )
        assistant = (
            f"{_literal(self.before_assistant)}{{{{ .Content }}}}{_literal(self.after_assistant)}"
        )
        start = f"{{{{ if not .System }}}}{_literal(self.start)}{{{{ end }}}}" if self.start else ""
        return (
            f"{start}{{{{ range $i, $_ := .Messages }}}}{system}"
            f'{{{{ if eq .Role "user" }}}}{user}'
            f'{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}'
            f"{'{{ end }}' if system else ''}{{{{ end }}}}{_literal(self.ask)}"
        )


def _literal(text: str) -> str:
    """Text that a Go template prints as it is."""
    return text.replace("{{", "{{ `{{` }}")


def turn_texts(template: ChatTemplate, bos: str) -> TurnTexts | None:
    """Derive what a template prints around turns; None if that does not describe the template.

    bos: the text of the BOS token if Ollama adds it, which is then left out.
    """
    user, answer, question, system, reply = _TEXTS
    ask_user: Message = {"role": "user", "content": user}
    turns: tuple[Message, ...] = (
        ask_user,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": question},
    )
    with_system: tuple[Message, ...] = ({"role": "system", "content": system}, *turns)
    try:
        first = template.render([ask_user], ask=False).removeprefix(bos)
        with_generation_prompt = template.render([ask_user], ask=True).removeprefix(bos)
        several = template.render(turns, ask=True).removeprefix(bos)
    except RowError:
        return None
    if not with_generation_prompt.startswith(first):
        return None
    end = template.turn_end.text + template.turn_end.after
    between = several.partition(answer)[2].partition(question)[0]
    if not between.startswith(end):
        return None
    before_user = between.removeprefix(end)
    head, _, after_user = first.partition(user)
    middle = several.partition(user)[2].partition(answer)[0]
    if not head.endswith(before_user) or not middle.startswith(after_user):
        return None
    before_system, after_system, first_user = "", "", None
    try:
        text = template.render(with_system, ask=True).removeprefix(bos)
        before_system, _, rest = text.partition(system)
        first_user = rest.partition(user)[0]
        if first_user.endswith(before_user):
            after_system, first_user = first_user.removesuffix(before_user), before_user
    except RowError:
        pass
    texts = TurnTexts(
        start=head.removesuffix(before_user),
        before_system=before_system,
        after_system=after_system,
        first_user=first_user,
        before_user=before_user,
        after_user=after_user,
        before_assistant=middle.removeprefix(after_user),
        after_assistant=end,
        ask=with_generation_prompt.removeprefix(first),
    )
    longer: tuple[Message, ...] = (
        *turns,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": user},
    )
    conversations = [(ask_user,), turns, longer]
    if first_user is not None:
        conversations += [(with_system[0], *c) for c in (conversations[0], turns, longer)]
    for messages in conversations:
        if texts.render(messages) != template.render(messages, ask=True).removeprefix(bos):
            return None
    return texts


def modelfile(file: str, encoder: Encoder, *, adds_bos: bool) -> tuple[str, list[str]]:
    """Return the Modelfile for a GGUF file, and notes on what it cannot express.

    adds_bos: the file tells Ollama to add BOS.
    """
    tokenizer = encoder.tokenizer
    notes: list[str] = []
    lines = [f"FROM ./{file}"]
    if encoder.template.exists:
        bos = str(tokenizer.bos_token) if adds_bos else ""
        texts = turn_texts(encoder.template, bos)
        template = texts.go_template() if texts is not None else ""
        if texts is None or '"""' in template:
            notes.append(
                "the chat template cannot be written in Ollama's language: the Modelfile has no "
                "TEMPLATE, and Ollama guesses one; serve the model with llama-server or vLLM"
            )
        else:
            lines.append(f'TEMPLATE """{template}"""')
            if texts.first_user is None:
                notes.append("the chat template has no system messages; Ollama ignores them")
    else:
        lines.append('TEMPLATE "{{ .Prompt }}"')
    for token in encoder.end_ids:
        name = str(tokenizer.convert_ids_to_tokens(token))
        escaped = name.replace("\\", "\\\\").replace('"', '\\"')
        lines.append(f'PARAMETER stop "{escaped}"')
    return "\n".join(lines) + "\n", notes
