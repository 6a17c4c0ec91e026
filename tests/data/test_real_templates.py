"""Chat templates of published models: training covers the tokens that the model generates, and none
that a template inserts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.data.encoding import HERE, answered, chat, encoded, text, trained, turn
from tests.tiny import tokenizer_of
from valence.data.encode import Encoder
from valence.data.encoded_set import EncodedSet
from valence.types import Chat, Demonstration, Preference, TokenizedCompletion, TokenizedExample

FOLDER = Path(__file__).parent / "templates"

DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
CHATML_STOPS = ("<|im_end|>", "<|endoftext|>")
GLM_STOPS = ("<|endoftext|>", "<|user|>", "<|observation|>")


@dataclass(frozen=True)
class Model:
    """What a model's files say.

    ``end``: the token that ends a turn; ``stops``: its generation config's.
    """

    end: str
    eos: str
    stops: tuple[str, ...] = ()


MODELS = {
    "deepseek-r1-distill-qwen": Model(DEEPSEEK_END, DEEPSEEK_END),
    "deepseek-v3.1": Model(DEEPSEEK_END, DEEPSEEK_END),
    "glm-4.6": Model("<|user|>", "<|endoftext|>", GLM_STOPS),
    "glm-4.7-flash": Model("<|user|>", "<|endoftext|>", GLM_STOPS),
    "gpt-oss": Model("<|return|>", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>")),
    "granite-3.3": Model("<|end_of_text|>", "<|end_of_text|>", ("<|end_of_text|>",)),
    "mistral-nemo": Model("</s>", "</s>", ("</s>",)),
    "phi-3.5": Model("<|end|>", "<|endoftext|>", ("<|end|>", "<|assistant|>", "<|endoftext|>")),
    "qwen2.5": Model("<|im_end|>", "<|im_end|>", CHATML_STOPS),
    "qwen3": Model("<|im_end|>", "<|im_end|>", CHATML_STOPS),
    "qwen3.5": Model("<|im_end|>", "<|im_end|>", CHATML_STOPS),
    "qwq": Model("<|im_end|>", "<|im_end|>", CHATML_STOPS),
    "seed-oss": Model("<seed:eos>", "<seed:eos>", ("<seed:eos>",)),
    "smollm3": Model("<|im_end|>", "<|im_end|>", ("<|im_end|>",)),
}

SWITCHES = {
    "deepseek-v3.1": "thinking",
    "gpt-oss": None,
    "qwen2.5": None,
    "granite-3.3": "thinking",
} | dict.fromkeys(("mistral-nemo", "phi-3.5", "seed-oss"))
"""The variable that turns reasoning on and off, where it is not ``enable_thinking``; None: there is
none.
"""

OTHER_HEADER = {
    ("deepseek-r1-distill-qwen", True),
    ("glm-4.7-flash", None),
    ("glm-4.7-flash", True),
    ("qwq", True),
}
"""Templates whose generation prompt opens a block of reasoning that an answer without reasoning
does not have.
"""


def kwargs_of(name: str, switch: bool | None) -> dict[str, Any]:
    variable = SWITCHES.get(name, "enable_thinking")
    return {} if switch is None or variable is None else {variable: switch}


def cases() -> Iterator[tuple[str, bool | None]]:
    for name, switch in product(MODELS, (None, False, True)):
        if switch is None or kwargs_of(name, switch):
            yield name, switch


@cache
def model_encoder(name: str, switch: bool | None, train_on: str = "completion") -> Encoder:
    model = MODELS[name]
    tokenizer = tokenizer_of(
        (FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), eos=model.eos, stops=model.stops
    )
    stops = [int(tokenizer.convert_tokens_to_ids(stop)) for stop in model.stops]  # type: ignore[arg-type]
    return Encoder(
        tokenizer,
        max_length=10_000,
        train_on=train_on,  # type: ignore[arg-type]
        chat_template_kwargs=kwargs_of(name, switch),
        stop_ids=stops,
    )


def context(unit: TokenizedExample, answer: TokenizedCompletion) -> tuple[int, ...]:
    """The tokens in front of the first that is trained on."""
    return unit.prompt_ids + answer.ids[: answer.mask.index(True)]


def squeezed(words: str) -> str:
    return "".join(words.split())


def test_every_template_file_is_tested_and_has_its_licence_named() -> None:
    files = {path.stem for path in FOLDER.glob("*.jinja")}
    assert files == set(MODELS)
    assert len(files) >= 10
    licences = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.jinja`" in licences for name in files)


@pytest.mark.parametrize(("name", "switch"), list(cases()))
def test_the_mask_is_the_completion_and_the_end_of_the_turn(name: str, switch: bool | None) -> None:
    enc, end = model_encoder(name, switch), MODELS[name].end
    for prompt in (
        chat("hello"),
        chat("hello", "good day", "moon?"),
        Chat((turn("system", "be kind"), turn("user", "hello"))),
    ):
        unit = encoded(enc, answered(prompt, chat("the sun", first="assistant")))
        [answer] = unit.answers
        message = trained(enc, answer)
        assert message.lstrip() == f"the sun{end}"
        assert answer.ids[-1] == enc.tokenizer.convert_tokens_to_ids(end)
        assert answer.mask[answer.mask.index(True) :] == (True,) * sum(answer.mask)
        # white space right behind the generation prompt, which the model has to generate
        if message != message.lstrip():
            assert context(unit, answer) == enc.encode_prompt(prompt)


@pytest.mark.parametrize(("name", "switch"), list(cases()))
def test_training_continues_the_prompt_that_is_sampled_from(name: str, switch: bool | None) -> None:
    enc = model_encoder(name, switch)
    for prompt in (chat("hello"), chat("hello", "good day", "moon?")):
        request = enc.encode_prompt(prompt)
        row = answered(prompt, chat("the sun", first="assistant"))
        unit = encoded(enc, row)
        continues = context(unit, unit.answers[0])[: len(request)] == request
        assert continues == ((name, switch) not in OTHER_HEADER)
        assert ("another_header" in enc.encode_all([row]).notes) == (not continues)


@pytest.mark.parametrize(("name", "switch"), list(cases()))
def test_reasoning_in_a_completion_is_trained_on_as_it_is_generated(
    name: str, switch: bool | None
) -> None:
    """Also where the template drops it from a conversation, and without an opening tag that the
    generation prompt has.
    """
    enc, end = model_encoder(name, switch), MODELS[name].end
    request = text(enc, enc.encode_prompt(chat("hello")))
    unit = encoded(
        enc, answered(chat("hello"), chat("<think>\nwhy\n</think>\n\nthe sun", first="assistant"))
    )
    full = text(enc, unit.prompt_ids + unit.answers[0].ids)
    message = squeezed(trained(enc, unit.answers[0]))
    opened = squeezed(request).endswith("<think>")
    assert message == squeezed(f"{'' if opened else '<think>'}why</think>the sun{end}")
    # else the prompt rules reasoning out, and this completion has some
    if not squeezed(request).endswith("</think>"):
        assert full.startswith(request)
    generated = chat(
        "why</think>the sun" if opened else "<think>why</think>the sun", first="assistant"
    )
    assert (
        squeezed(trained(enc, encoded(enc, answered(chat("hello"), generated)).answers[0]))
        == message
    )


@pytest.mark.parametrize(("name", "switch"), list(cases()))
def test_reasoning_in_a_field_is_not_trained_on_after_another_prompt(
    name: str, switch: bool | None
) -> None:
    """Where a variable disables reasoning, the model never samples it."""
    enc = model_encoder(name, switch)
    message = {**turn("assistant", "the sun"), "reasoning_content": "because it shines"}
    result = enc.encode_all([answered(chat("hello"), Chat((message,)))])
    if result.unusable:
        assert switch is False
        assert result.unusable[0].kind == "reasoning_disabled"
        return
    (unit,) = result.units
    if "because it shines" in trained(enc, unit.answers[0]) and switch is not True:
        request = enc.encode_prompt(chat("hello"))
        assert (unit.prompt_ids + unit.answers[0].ids)[: len(request)] == request


def test_reasoning_is_refused_where_it_is_disabled() -> None:
    message = {**turn("assistant", "the sun"), "reasoning_content": "because it shines"}
    rows = [answered(chat("hello"), Chat((message,))), answered(chat("hello"), Chat((message,)))]
    refused = model_encoder("qwen3", False).encode_all(rows).unusable
    assert [row.kind for row in refused] == ["reasoning_disabled"] * 2
    assert not model_encoder("qwen3", True).encode_all(rows).unusable


@pytest.mark.parametrize(("name", "switch"), list(cases()))
def test_every_assistant_turn_can_be_trained_on(name: str, switch: bool | None) -> None:
    enc, end = model_encoder(name, switch, "assistant"), MODELS[name].end
    prompt = chat("hello", "good day", "moon?", "no", "sun?")
    row = Demonstration(
        prompt=prompt, completion=chat("a star", first="assistant"), weight=2.0, origin=HERE
    )
    result: EncodedSet = enc.encode_all([row], ["f"])
    assert not result.unusable
    message = [turn for unit in result.units for turn in _turns(enc, unit, end)]
    assert [words.lstrip() for words in message] == ["good day", "no", "a star"]
    assert {(unit.weight, unit.source, unit.origin) for unit in result.units} == {(2.0, "f", HERE)}
    if len(result.units) == 1:
        assert result.units[0].prompt_ids == enc.encode_prompt(prompt)
        assert (result.turn_examples, "split_turns" in result.notes) == ((), False)
        return
    assert [unit.id for unit in result.units] == [turn.id for turn in result.turn_examples]
    assert len({unit.id for unit in result.units}) == 3
    assert result.notes["split_turns"] == (HERE,)
    for i, unit in zip((1, 3, 5), result.units, strict=True):
        requests = enc.encode_prompt(Chat((*prompt.messages[:i],)))
        assert (
            context(unit, unit.answers[0])[: len(requests)] == requests
            or (name, switch) in OTHER_HEADER
        )


def _turns(enc: Encoder, unit: TokenizedExample, end: str) -> list[str]:
    """What is trained on, cut where turns end."""
    prompt = trained(enc, TokenizedCompletion(unit.prompt_ids, unit.prompt_mask))
    return [turn for turn in (prompt + trained(enc, unit.answers[0])).split(end) if turn]


@pytest.mark.parametrize("name", [n for n in MODELS if kwargs_of(n, True)])
def test_the_switch_for_reasoning_reaches_the_prompt(name: str) -> None:
    off, on = (model_encoder(name, switch).encode_prompt(chat("hello")) for switch in (False, True))
    assert off != on


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.6", "deepseek-v3.1"])
def test_answers_with_and_without_reasoning_share_a_prompt(name: str) -> None:
    """A pair whose sides need different contexts keeps what they have in common as its prompt."""
    for switch in (None, False):
        enc, end = model_encoder(name, switch), MODELS[name].end
        pair = Preference(
            prompt=chat("hello"),
            chosen=chat("<think>\nwhy\n</think>\n\nthe sun", first="assistant"),
            rejected=chat("moon", first="assistant"),
            origin=HERE,
        )
        unit = encoded(enc, pair)
        alone = [encoded(enc, answered(pair.prompt, side)) for side in (pair.chosen, pair.rejected)]
        for answer, single in zip(unit.answers, alone, strict=True):
            assert unit.prompt_ids + answer.ids == single.prompt_ids + single.answers[0].ids
            assert trained(enc, answer) == trained(enc, single.answers[0])
        assert trained(enc, unit.answers[1]).lstrip() == f"moon{end}"


def test_reasoning_fields_and_tool_calls_are_trained_on_with_their_markup() -> None:
    enc = model_encoder("qwen3", None)
    reasons = Chat((turn("assistant", "the sun", reasoning_content="why"),))
    unit = encoded(enc, answered(chat("hello"), reasons))
    assert trained(enc, unit.answers[0]) == "<think>\nwhy\n</think>\n\nthe sun<|im_end|>"
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    unit = encoded(enc, answered(chat("hello"), Chat((turn("assistant", "", tool_calls=[call]),))))
    message = trained(enc, unit.answers[0])
    assert message == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    several = Chat(
        (
            turn("assistant", "", tool_calls=[call]),
            turn("tool", "42"),
            turn("assistant", "it is 42"),
        )
    )
    unit = encoded(enc, answered(chat("hello"), several))
    assert trained(enc, unit.answers[0]) == message + "it is 42<|im_end|>"
    harmony = model_encoder("gpt-oss", None)
    unit = encoded(
        harmony, answered(chat("hello"), Chat((turn("assistant", "the sun", thinking="why"),)))
    )
    assert trained(harmony, unit.answers[0]) == (
        "<|channel|>analysis<|message|>why<|end|>"
        "<|start|>assistant<|channel|>final<|message|>the sun<|return|>"
    )


def test_ignored_reasoning_is_noted() -> None:
    row = answered(chat("hello"), Chat((turn("assistant", "the sun", reasoning_content="why"),)))
    assert "reasoning_ignored" in model_encoder("phi-3.5", None).encode_all([row]).notes
    assert "reasoning_ignored" not in model_encoder("qwen3", None).encode_all([row]).notes


def test_turns_without_weight_are_context_only() -> None:
    for name in ("qwen2.5", "qwen3"):
        enc = model_encoder(name, None, "assistant")
        prompt = Chat(
            (turn("user", "hello"), turn("assistant", "good day", weight=0), turn("user", "moon?"))
        )
        row = Demonstration(prompt=prompt, completion=chat("no", first="assistant"), origin=HERE)
        message = [
            words
            for unit in enc.encode_all([row]).units
            for words in _turns(enc, unit, "<|im_end|>")
        ]
        assert message == ["no"]
