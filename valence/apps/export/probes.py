"""The prompts by which an exported model is compared with its run, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from valence.data.encode import Encoder
from valence.data.vocab import RowError
from valence.errors import UserError
from valence.rollouts.kv import forward_with_cache
from valence.types import Chat, Message

MAX_NEW_TOKENS = 16

TEXTS = {
    "question": "What is the capital of France?",
    "numbers": "Add 3.14159, 2,718, 1000000 and 12:05 on 2026-11-25; then 7 x 8 = 56.",
    "white space": "  two spaces,\ttab,\n\n\nthree newlines  and   some at the end  ",
    "contractions": "It's what we'd do: they'RE sure, I'M not, and y'all can't've known.",
    "code": "def f(x):\n    if x>=0 and not None:\n\t\treturn {'a': [x**2, x//3]}  # done\n",
    "symbols": 'https://example.org/a?b=c&d=%20#e -- "quotes" (x_1 + y^2) <b>html</b> $5 €7 @me',
    "emoji": "Hi 🙂 👍🏽 👩‍👩‍👧 🇫🇷!",
    "accents": "Ça coûte très cher, señor; größer als Łódź?",
    "chinese and japanese": "请用中文回答：今天天气怎么样？日本語でもいいです。",  # noqa: RUF001
    "arabic and hindi": "ما هي عاصمة مصر؟ नमस्ते दुनिया, मेरा नाम क्या है",
    "other scripts": "Привет, как дела? Γειά σου, 안녕하세요, สวัสดีครับ",  # noqa: RUF001
    "long words": "Donaudampfschifffahrtsgesellschaft antidisestablishmentarianism aaaaaaaaaa",
}
"""Texts that tokenizers split in different ways."""

CONVERSATIONS: dict[str, tuple[Message, ...]] = {
    "system message": (
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What is 2 + 2?"},
    ),
    "several turns": (
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada."},
        {"role": "user", "content": "What is my name?"},
    ),
}


@dataclass(frozen=True)
class Probe:
    """A prompt that the run and an exported model both complete.

    messages: None for plain text. text: as rendered by the run. ids: its tokens in the run.
    """

    name: str
    messages: tuple[Message, ...] | None
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class ProbeResult:
    """An answer to a prompt.

    error: why the prompt could not be rendered. text, ids: the prompt as rendered and as tokens.
    completion: the most likely continuation of ``ids``. stop: whether a token (``stop``) or the
    limit (``length``) ended it. logits [N, V]: at the N tokens of the run's completion, after the
    run's prompt.
    """

    error: str | None
    text: str | None
    ids: tuple[int, ...]
    completion: tuple[int, ...]
    stop: str | None
    logits: np.ndarray[Any, Any]


@dataclass(frozen=True)
class ArtifactResult:
    """The answers of an exported model.

    runtime: the program that ran it, with its version. stops: for each end token of the run,
    whether the program stops there. other_stops: further tokens at which it stops, if known.
    """

    runtime: str
    stops: tuple[bool, ...]
    results: tuple[ProbeResult, ...]
    other_stops: tuple[int, ...] = ()


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Log-probabilities [N, V] in float64."""
    values = logits.astype(np.float64)
    values = values - values.max(axis=1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=1, keepdims=True))


def make_probes(encoder: Encoder) -> list[Probe]:
    """Prompts of many kinds, as the run renders and encodes them.

    Conversations that the chat template refuses are left out. Raises UserError if none is left.
    """
    if not encoder.template.exists:
        return [
            Probe(name, None, text, encoder.encode_prompt(text)) for name, text in TEXTS.items()
        ]
    conversations: dict[str, tuple[Message, ...]] = {
        name: ({"role": "user", "content": text},) for name, text in TEXTS.items()
    }
    probes: list[Probe] = []
    for name, messages in (conversations | CONVERSATIONS).items():
        chat = Chat(messages)
        try:
            text = encoder.template.prompt(chat)
        except RowError:
            continue
        probes.append(Probe(name, messages, text, encoder.encode_prompt(chat)))
    if not probes:
        raise UserError(
            "the chat template fails on every prompt of the verification",
            code="verification-no-prompts",
            where="data.chat_template",
            fix="correct the chat template, or export with --no-verify",
        )
    return probes


@torch.no_grad()
def answer_probes(
    model: nn.Module,
    probes: Sequence[Probe],
    end_ids: Collection[int],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    on_probe: Callable[[int], None] = lambda done: None,
) -> list[ProbeResult]:
    """The most likely answers of a model in this process, with their logits."""
    answers: list[ProbeResult] = []
    for i, probe in enumerate(probes):
        completion, logits = _greedy(model, probe.ids, end_ids, max_new_tokens)
        stop = "stop" if completion[-1] in end_ids else "length"
        answers.append(ProbeResult(None, probe.text, probe.ids, completion, stop, logits.numpy()))
        on_probe(i + 1)
    return answers


def _greedy(
    model: Any, ids: Sequence[int], end_ids: Collection[int], max_new_tokens: int
) -> tuple[tuple[int, ...], Tensor]:
    """The greedy completion of a prompt, and the logits of its tokens [N, V]."""
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    cache: Any = None
    completion, rows = list[int](), list[Tensor]()
    while len(completion) < max_new_tokens:
        output, cache = forward_with_cache(model, cache, input_ids=tokens)
        rows.append(output.logits[0, -1].float().cpu())
        completion.append(int(rows[-1].argmax()))
        if completion[-1] in end_ids:
            break
        tokens = torch.tensor([completion[-1:]], device=device)
    return tuple(completion), torch.stack(rows)


@torch.no_grad()
def run_transformers(
    folder: Path,
    probes: Sequence[Probe],
    expected: Sequence[ProbeResult],
    *,
    variables: Mapping[str, Any],
    end_ids: Collection[int],
    is_adapter: bool = False,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    on_probe: Callable[[int], None] = lambda done: None,
) -> ArtifactResult:
    """Answers of an exported folder, loaded with transformers.

    is_adapter: the folder has an adapter, which peft loads onto the base model that it names.
    dtype: of the weights of the base model; by default that of its files.
    """
    import transformers

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    settings = {"dtype": dtype or "auto", "trust_remote_code": trust_remote_code}
    runtime = f"transformers {transformers.__version__}"
    model: Any
    if is_adapter:
        import peft

        model = peft.AutoPeftModelForCausalLM.from_pretrained(str(folder), **settings)
        runtime += f", peft {peft.__version__}"
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, **settings)
    model.eval()
    stops = tokenizer.eos_token_id if is_adapter else model.generation_config.eos_token_id
    stop_ids = set(stops) if isinstance(stops, list) else {stops}
    results: list[ProbeResult] = []
    for i, (probe, answer) in enumerate(zip(probes, expected, strict=True)):
        error: str | None = None
        text: str | None = probe.text
        ids, completion, stop, logits = (), (), None, None
        try:
            if probe.messages is not None:
                text = tokenizer.apply_chat_template(
                    [dict(m) for m in probe.messages],
                    add_generation_prompt=True,
                    tokenize=False,
                    **variables,
                )
        except (TemplateError, TypeError, ValueError) as failure:
            error, text = str(failure), None
        if text is not None:
            ids = tuple(tokenizer.encode(text, add_special_tokens=probe.messages is None))
            completion, logits = _greedy(model, ids, stop_ids, MAX_NEW_TOKENS)
            stop = "stop" if completion[-1] in stop_ids else "length"
        if logits is None or (ids, completion) != (probe.ids, answer.completion):
            tokens = torch.tensor([[*probe.ids, *answer.completion]])
            start = len(probe.ids) - 1
            logits = model(input_ids=tokens).logits[0, start:-1].float()
        results.append(ProbeResult(error, text, ids, completion, stop, logits.numpy()))
        on_probe(i + 1)
    return ArtifactResult(
        runtime,
        tuple(i in stop_ids for i in end_ids),
        tuple(results),
        other_stops=tuple(sorted(stop_ids - {*end_ids, None})),
    )
