"""Models with tools: their templates, tokenizers and the tokens that end their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tests.data import tool_templates
from tests.tiny import tiny_tokenizer, tokenizer_of
from valence.data.template import chatml_template

FOLDER = Path(__file__).parent / "templates"
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")
GEMMA_TOKENS = ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
                "<tool_response|>", '<|"|>')  # fmt: skip


@dataclass(frozen=True)
class ToolModel:
    """A model with tools.

    ``call_end``, ``answer_end``: tokens that end turns with calls and without. ``reasoning``: the
    field for reasoning that the template needs on every turn, if any. ``num_calls``: most calls in
    a turn. ``after``: what the template prints behind the last turn.
    """

    format: str
    call_end: str
    answer_end: str
    stops: tuple[str, ...]
    template: str = ""
    eos: str = ""
    reasoning: str = ""
    num_calls: int = 2
    after: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tokens: tuple[str, ...] = ()
    system: bool = True


def _chatml(call_format: str, **more: Any) -> ToolModel:
    end = "<|im_end|>"
    return ToolModel(call_format, end, end, (end,), after="\n", **more)


TOOL_MODELS = {
    "chatml": _chatml("hermes"),
    "qwen2.5": _chatml("hermes"),
    "qwen3": _chatml("hermes", reasoning="reasoning_content"),
    "qwen3.5": _chatml("xml", reasoning="reasoning_content"),
    "seed-oss": ToolModel("xml", "<seed:eos>", "<seed:eos>", ("<seed:eos>",)),
    "glm-4.6": ToolModel(
        "glm", "<|observation|>", "<|user|>", GLM_STOPS, eos="<|endoftext|>",
        reasoning="reasoning_content",
    ),
    "glm-4.7-flash": ToolModel(
        "glm", "<|observation|>", "<|user|>", GLM_STOPS, eos="<|endoftext|>",
        reasoning="reasoning_content",
    ),
    "llama": ToolModel(
        "llama", "<|eot_id|>", "<|eot_id|>", ("<|eot_id|>", "<|eom_id|>"), tool_templates.LLAMA,
        num_calls=1,
    ),
    "llama-environment": ToolModel(
        "llama", "<|eom_id|>", "<|eot_id|>", ("<|eot_id|>", "<|eom_id|>"), tool_templates.LLAMA,
        num_calls=1, kwargs={"environment": True},
    ),
    "mistral-nemo": ToolModel("mistral", "</s>", "</s>", ("</s>",), system=False),
    "mistral-args": ToolModel("mistral", "</s>", "</s>", ("</s>",), tool_templates.MISTRAL),
    "gemma": ToolModel(
        "gemma", "<|tool_response>", "<turn|>", ("<turn|>", "<|tool_response>"),
        tool_templates.GEMMA, after="\n", tokens=GEMMA_TOKENS,
    ),
    "function-gemma": ToolModel(
        "gemma", "<end_of_turn>", "<end_of_turn>", ("<end_of_turn>",),
        tool_templates.FUNCTION_GEMMA, after="\n",
        tokens=("<escape>", "<start_function_call>", "<end_function_call>"),
    ),
    "gpt-oss": ToolModel(
        "harmony", "<|call|>", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"),
        num_calls=1,
    ),
    "deepseek-v3.1": ToolModel("deepseek", DEEPSEEK_END, DEEPSEEK_END, (DEEPSEEK_END,)),
}  # fmt: skip


@cache
def tool_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tiny tokenizer with the template of the model, and its markup as special tokens."""
    model = TOOL_MODELS[name]
    if name == "chatml":
        tokenizer = tiny_tokenizer(None)
        tokenizer.chat_template = chatml_template(tokenizer)
        return tokenizer
    template = model.template or (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    eos = model.eos or model.answer_end
    return tokenizer_of(template, eos=eos, stops=(*model.stops, *model.tokens))


def stop_ids(name: str) -> list[int]:
    """The stops of the model's generation config."""
    ids: Any = tool_tokenizer(name).convert_tokens_to_ids(list(TOOL_MODELS[name].stops))
    return ids


def tool(name: str, **types: str) -> dict[str, Any]:
    """A tool with parameters of these JSON types."""
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind, "description": key} for key, kind in types.items()},
        "required": list(types),
    }
    function = {"name": name, "description": f"About {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def call(name: str, arguments: Mapping[str, Any], call_id: str = "call00000") -> dict[str, Any]:
    """A call in a message."""
    return {
        "type": "function",
        "id": call_id,
        "function": {"name": name, "arguments": dict(arguments)},
    }


def results_of(calls: Sequence[Mapping[str, Any]], *contents: str) -> list[dict[str, Any]]:
    """The results of calls as messages."""
    return [
        {"role": "tool", "name": c["function"]["name"], "tool_call_id": c["id"], "content": content}
        for c, content in zip(calls, contents, strict=True)
    ]


DEEPSEEK_MARKUP = tuple(
    f"<\uff5ctool\u2581{word}\uff5c>"
    for word in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
MARKUP = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>",
    "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|tool_call>", "<tool_call|>", "call:", '<|"|>', "<escape>", "<start_function_call>",
    "<end_function_call>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "to=functions.f",
    "analysis", *DEEPSEEK_MARKUP, "```json\n", '{"name": ', '"f"', ', "arguments": ',
    ', "parameters": ', "{", "}", "[", "]", ";", ":", ",", '"x"', "1", "\n", " ", "\\ud800", "NaN",
)  # fmt: skip
_PIECES = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=4)), max_size=30)
MARKUP_TEXT = _PIECES.map("".join)
"""Text that is made of markup of all formats and a few other characters."""
