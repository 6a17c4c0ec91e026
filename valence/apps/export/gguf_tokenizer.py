"""Describe a tokenizer in the fields of a GGUF file.

llama.cpp implements tokenizers itself. A byte-level BPE tokenizer is reproduced if llama.cpp knows
its pre-tokenizer, the rule that splits a text into words; a wrong rule changes tokens silently. A
SentencePiece BPE tokenizer is reproduced from the order of its merges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from valence.data.template import ChatTemplate
from valence.data.vocab import RowError, Vocab
from valence.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens in GGUF."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_TAIL}"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenizerFields:
    """A tokenizer in the terms of llama.cpp.

    model: ``gpt2`` for byte-level BPE, ``llama`` for SentencePiece. pre: the pre-tokenizer. types:
    the kind of each token. scores: of SentencePiece tokens, the higher the earlier they are merged.
    special: ids by role. adds_bos: BOS is put before prompts. adds_space: a space before texts.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    scores: Sequence[float] | None
    special: Mapping[str, int]
    adds_bos: bool
    adds_space: bool
    chat_template: str | None


def tokenizer_fields(
    tokenizer: Any, num_rows: int, end_ids: Collection[int] = ()
) -> TokenizerFields:
    """Describe a tokenizer.

    num_rows: rows of the embedding matrix, which may be padded. end_ids: tokens at which the model
    stops. Raises UserError for a tokenizer that llama.cpp would read differently.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise _unsupported("it has no tokenizer.json")
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    model = spec["model"]
    if model["type"] != "BPE":
        raise _unsupported(f"its model is {model['type']}, not BPE")
    added = {int(token["id"]): token for token in spec["added_tokens"]}
    vocabulary = {int(i): text for text, i in model["vocab"].items()}
    vocabulary |= {i: token["content"] for i, token in added.items()}
    if vocabulary and max(vocabulary) >= num_rows:
        raise UserError(
            f"the tokenizer has token id {max(vocabulary)}, and the model {num_rows} embeddings",
            code="vocabulary-too-large",
            where="tokenizer.json",
            fix="use the tokenizer that the model was trained with",
        )
    is_byte_level = _is_byte_level(spec)
    _check_normalizer(spec, is_byte_level)
    tokens, types = list[str](), list[int]()
    for i in range(num_rows):
        text = vocabulary.get(i)
        if text is None:
            tokens.append(f"[PAD{i}]")
            types.append(UNUSED)
        elif i in added:
            is_special = bool(added[i]["special"])
            # llama.cpp finds added tokens in the text before it writes spaces as ▁
            is_plain = is_special or is_byte_level
            tokens.append(text if is_plain else text.replace("▁", " "))
            types.append(CONTROL if is_special else USER_DEFINED)
        else:
            tokens.append(text)
            is_byte = not is_byte_level and BYTE_TOKEN.fullmatch(text)
            types.append(BYTE if is_byte else NORMAL)
    unknown = tokenizer.unk_token_id
    if not is_byte_level and unknown is not None:
        types[unknown] = UNKNOWN
    merges = [_pair(merge) for merge in model["merges"]]
    template = tokenizer.chat_template
    return TokenizerFields(
        model="gpt2" if is_byte_level else "llama",
        pre=_pre_tokenizer(spec) if is_byte_level else "default",
        tokens=tokens,
        types=types,
        merges=[" ".join(pair) for pair in merges],
        scores=None if is_byte_level else _scores(tokens, merges),
        special=_special(tokenizer, end_ids),
        adds_bos=_adds_bos(tokenizer),
        adds_space=not is_byte_level and _adds_space(tokenizer),
        chat_template=tokenizer.get_chat_template() if template else None,
    )


def _unsupported(reason: str) -> UserError:
    return UserError(
        f"llama.cpp would read this tokenizer differently: {reason}",
        code="gguf-tokenizer-unsupported",
        where="tokenizer.json",
        fix="convert the exported folder with convert_hf_to_gguf.py from the llama.cpp repository",
    )


def _steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence."""
    if part is None:
        return []
    return list(part[key]) if part["type"] == "Sequence" else [part]


def has_nfc_normalizer(tokenizer: Any) -> bool:
    """Whether a tokenizer normalizes texts to Unicode form C, which llama.cpp never does."""
    if not getattr(tokenizer, "is_fast", False):
        return False
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    return any(step["type"] == "NFC" for step in _steps(spec["normalizer"], "normalizers"))


def _check_normalizer(spec: Mapping[str, Any], is_byte_level: bool) -> None:
    """Raise UserError for a normalizer, or a SentencePiece pre-tokenizer, that llama.cpp lacks.

    NFC is accepted, because nearly all prompts are in this form already.
    """
    known = {"NFC"} if is_byte_level else {"Prepend", "Replace"}
    steps = _steps(spec["normalizer"], "normalizers")
    if not is_byte_level:
        known |= {"Metaspace", "Split"}
        steps += _steps(spec["pre_tokenizer"], "pretokenizers")
    for step in steps:
        is_other = step["type"] == "Replace" and (
            (step["pattern"], step["content"]) != ({"String": " "}, "▁")
        )
        if step["type"] not in known or is_other:
            raise _unsupported(f"it normalizes or splits text with the step {step['type']}")


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    steps = _steps(spec["pre_tokenizer"], "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps)


def _pre_tokenizer(spec: Mapping[str, Any]) -> str:
    """llama.cpp's name for the pre-tokenizer of a byte-level BPE tokenizer."""
    steps = _steps(spec["pre_tokenizer"], "pretokenizers")
    *before, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise _unsupported("its pre-tokenizer adds a space, or has steps after ByteLevel")
    ignores_merges = bool(spec["model"].get("ignore_merges"))
    kinds = [step["type"] for step in before]
    name = None
    if last.get("use_regex", True):
        if kinds == []:
            name = "gpt-2"
        elif kinds == ["Digits"] and before[0]["individual_digits"]:
            name = "smollm"
    elif kinds == ["Split"] and before[0]["behavior"] == "Isolated" and not before[0]["invert"]:
        expression = before[0]["pattern"].get("Regex")
        if expression == QWEN2:
            name = "qwen2"
        elif expression == LLAMA3:
            return "llama-bpe" if ignores_merges else "dbrx"
    if name is None:
        raise _unsupported("its pre-tokenizer is none of gpt-2, smollm, qwen2 and llama-3")
    if ignores_merges:
        raise _unsupported("it ignores merges for words of the vocabulary")
    return name


def _pair(merge: str | Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Scores by which llama.cpp merges in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    lowest = -float(len(merges)) - 1
    return [-float(ranks[token]) if token in ranks else lowest for token in tokens]


def _special(tokenizer: Any, end_ids: Collection[int]) -> dict[str, int]:
    """Ids by the role that llama.cpp knows them by.

    llama.cpp stops at EOS and at the tokens of two further roles, end of turn and end of message,
    which here are any further tokens at which the model stops.
    """
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    ends = [i for i in end_ids if i != tokenizer.eos_token_id]
    if ids["eos"] is None and ends:
        ids["eos"] = ends.pop(0)
    ids |= dict(zip(("eot", "eom"), ends, strict=False))
    return {name: int(i) for name, i in ids.items() if i is not None}


def _adds_space(tokenizer: Any) -> bool:
    """Whether a SentencePiece tokenizer puts a space before a text.

    llama.cpp treats the start of a prompt and the text after a special token alike. Some tokenizers
    put a space only at the start of a prompt. Chats usually start with a special token instead.
    """
    marker = next(iter(tokenizer.all_special_tokens), "") if tokenizer.chat_template else ""
    ids = tokenizer.encode(f"{marker}a", add_special_tokens=False)
    return tokenizer.convert_ids_to_tokens(ids)[1 if marker else 0].startswith("▁")


def _adds_bos(tokenizer: Any) -> bool:
    """Whether llama.cpp must put BOS before prompts.

    It removes the BOS that a chat template prints, and adds its own. Chats whose template prints
    none are trained without BOS, even if the tokenizer adds it to plain text.
    """
    vocab = Vocab(tokenizer)
    if vocab.bos is None or vocab.prefix != (vocab.bos,):
        return False
    if not tokenizer.chat_template:
        return True
    try:
        text = ChatTemplate(tokenizer).render([{"role": "user", "content": "a"}], ask=True)
    except RowError:
        return True
    return text.startswith(str(tokenizer.bos_token))
