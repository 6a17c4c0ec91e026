"""Training, sampling, scoring and the exported model agree on plain text, on the chat template and
on end tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer, GenerationConfig

import valence
from tests.command import command
from tests.errors import raises_error
from tests.tiny import CHATML, tiny_tokenizer, tokenizer_of
from tests.tiny_models import tiny
from tests.training.rounds import sample
from tests.training.scoring import read, score, write
from valence.api import build_run
from valence.config.load import load_recipe
from valence.models.build import generation_stops
from valence.rollouts.protocol import Sampling
from valence.training.open_run import restore
from valence.training.prepare import Prepared, prepare
from valence.training.start import show_audit

PAIRS = [
    {"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i} {i}"} for i in range(6)
]
CHATS = [{**pair, "prompt": [{"role": "user", "content": pair["prompt"]}]} for pair in PAIRS]
SWITCHED = CHATML.replace(
    "assistant\n' }}", "assistant\n' }}{% if not think %}{{ '<think></think>' }}{% endif %}"
)
"""ChatML whose generation prompt has an empty block of reasoning unless ``think`` is true."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the models `chat` and `base`, of which only one has a chat template,
    and rows.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    saved("chat", CHATML)
    saved("base", None)
    write("pairs.jsonl", PAIRS)
    write("chats.jsonl", CHATS)
    return tmp_path


def saved(name: str, template: str | None, **changes: Any) -> str:
    tokenizer = tiny_tokenizer(template)
    model: Any = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32, **changes)
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    return name


def recipe(model: str = "chat", rows: str = "pairs.jsonl", **data: Any) -> dict[str, Any]:
    return {
        "method": "dpo",
        "model": {"name": model},
        "data": {"train": rows, "max_length": 128, **data},
        "train": {"batch_size": 3, "max_steps": 1},
        "run": {"dir": "run"},
    }


def prepared(**args: Any) -> Prepared:
    return prepare(load_recipe(recipe(**args)))


def library_prompt_ids(tokenizer: Any, text: str, **kwargs: Any) -> list[int]:
    """What a chat is sampled from, by the library alone."""
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, **kwargs
    )["input_ids"]


# --- plain text


@pytest.mark.parametrize("as_chat", [
    "auto",
    pytest.param(True, marks=pytest.mark.slow),
    pytest.param(False, marks=pytest.mark.slow),
])  # fmt: skip
def test_training_sampling_scoring_and_the_card_agree_on_plain_text(
    as_chat: Any, place: Path
) -> None:
    run = valence.train(recipe(as_chat=as_chat), quiet=True)
    tokenizer: Any = tiny_tokenizer()
    wanted = (
        library_prompt_ids(tokenizer, "question 0")
        if as_chat
        else tokenizer("question 0")["input_ids"]
    )
    trained = {unit.origin.line: unit for unit in run.prepared.corpora["train"].units}[1]
    assert list(trained.prompt_ids) == wanted
    sample("asked.jsonl", "run", data=(), prompt=["question 0"], n=1, max_new_tokens=2)
    sample("rows.jsonl", "run", data=("pairs.jsonl",), n=1, max_new_tokens=2)
    assert [row["prompt_ids"] for row in read("asked.jsonl") + read("rows.jsonl")[:1]] == [
        wanted,
        wanted,
    ]
    measured = restore(Path("run"), overrides=["data.train=[]"]).prepared
    assert measured.encoder.encode_prompt("question 0") == tuple(wanted)
    score("pairs.jsonl", target="run", out="scores.jsonl")
    assert json.loads(Path("scores.jsonl.about.json").read_text())["as_chat"] is bool(as_chat)
    assert ("apply_chat_template" in Path("run/model/README.md").read_text()) is bool(as_chat)
    assert f"as_chat: {str(bool(as_chat)).lower()}\n" in Path("run/config.yaml").read_text()
    assert json.loads(Path("run/run.json").read_text())["settings"]["data.as_chat"] is bool(as_chat)


def test_without_a_template_plain_text_stays_and_chats_name_the_setting(place: Path) -> None:
    result = prepared(model="base")
    assert (result.encoder.as_chat, result.uses_template, result.recipe.data.as_chat) == (
        False,
        False,
        False,
    )
    assert result.source.settings["data.as_chat"].is_automatic
    with raises_error(
        "chat-template-missing",
        where="data.as_chat",
        fix="data.chat_template: chatml",
    ):
        prepared(model="base", as_chat=True)
    with raises_error("row-no-template", where="chats.jsonl:1", fix="data.chat_template: chatml"):
        prepared(model="base", rows="chats.jsonl")


def test_text_that_holds_the_templates_markup_is_an_error_with_both_choices(place: Path) -> None:
    rendered = [
        {**pair, "prompt": f"<|im_start|>user\n{pair['prompt']}<|im_end|>\n<|im_start|>assistant\n"}
        for pair in PAIRS
    ]
    write("rendered.jsonl", rendered)
    with raises_error(
        "row-template-in-text",
        where="rendered.jsonl:1",
        fix="data.as_chat: false",
    ) as raised:
        prepared(rows="rendered.jsonl")
    assert "<|im_start|>" in raised.error.message
    raw = prepared(rows="rendered.jsonl", as_chat=False).corpora["train"].units
    chats = prepared(rows="chats.jsonl").corpora["train"].units
    assert [(unit.prompt_ids, unit.answers) for unit in raw] == [
        (unit.prompt_ids, unit.answers) for unit in chats
    ]
    write(
        "spoken.jsonl",
        [{**pair, "prompt": f"What is <b>{pair['prompt']}</b>, or </s>?"} for pair in PAIRS],
    )
    assert prepared(rows="spoken.jsonl").encoder.as_chat


def test_an_empty_prompt_is_no_message(place: Path) -> None:
    encoder = prepared().encoder
    assert encoder.encode_prompt("") == (tiny_tokenizer().bos_token_id,)


def test_a_resumed_run_keeps_its_choice(place: Path) -> None:
    valence.train(recipe(), quiet=True)
    Path("chat/chat_template.jinja").unlink()
    longer = {**recipe(), "train": {"batch_size": 3, "max_steps": 2}}
    with raises_error("run-differs", where="run.dir") as raised:
        valence.train(longer, quiet=True)
    assert "data.as_chat: true -> false" in raised.error.message


def test_check_inspect_and_train_print_the_choice(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(json.dumps(recipe()))
    end = tiny_tokenizer().eos_token_id
    for words in (["check"], ["inspect"], ["train"]):
        assert command(*words, "recipe.yaml") == 0
        shown = capsys.readouterr().out
        assert f"<|im_end|> ({end}), </s> (2)" in shown, words
        assert "data.as_chat: false" in shown, words  # how to choose the other form
    assert command("check", "recipe.yaml", "data.as_chat=false") == 0
    assert "data.as_chat: false" not in capsys.readouterr().out


# --- the template


@pytest.mark.parametrize("chosen", ["chatml", "templates/own.jinja"])
def test_a_chosen_template_is_kept_with_the_run_and_the_exported_tokenizer(
    chosen: str, place: Path
) -> None:
    Path("recipes/templates").mkdir(parents=True)
    Path("recipes/templates/own.jinja").write_text(
        CHATML.replace("<|im_end|>", "</s>"), encoding="utf-8"
    )
    Path("recipes/recipe.yaml").write_text(
        json.dumps(recipe("base", rows="../chats.jsonl", chat_template=chosen))
    )
    run = valence.train("recipes/recipe.yaml", quiet=True)
    Path("recipes/templates/own.jinja").unlink()
    exported: Any = AutoTokenizer.from_pretrained("run/model")
    assert exported.chat_template == run.prepared.tokenizer.chat_template
    assert ("</s>" in exported.chat_template) == (chosen != "chatml")
    again = restore(Path("run"), overrides=["data.train=[]"]).prepared.encoder
    assert (
        again.encode_prompt("hello")
        == run.prepared.encoder.encode_prompt("hello")
        == tuple(library_prompt_ids(exported, "hello"))
    )
    card = Path("run/model/README.md").read_text()
    assert "apply_chat_template" in card
    assert "im_start" not in card  # the template's text is not a line of its table of settings


def test_an_invalid_template_is_an_error_at_its_place(place: Path) -> None:
    Path("plain.txt").write_text("no markup")
    for chosen, code in (
        ("plain.txt", "template-invalid"),
        ("missing.jinja", "template-not-found"),
        ("chatlm", "template-not-found"),
    ):
        with raises_error(code, where="data.chat_template") as raised:
            load_recipe(recipe("base", chat_template=chosen))
        assert chosen in raised.error.message


def test_the_templates_variables_reach_every_rendering(place: Path) -> None:
    saved("chat", SWITCHED)
    tokenizer: Any = tiny_tokenizer(SWITCHED)
    run = valence.train(recipe(chat_template_kwargs={"think": True}), quiet=True)
    on, off = (
        library_prompt_ids(tokenizer, "question 0", think=True),
        library_prompt_ids(tokenizer, "question 0"),
    )
    assert on != off
    assert [
        list(u.prompt_ids) for u in run.prepared.corpora["train"].units if u.origin.line == 1
    ] == [on]
    sample("asked.jsonl", "run", data=(), prompt=["question 0"], n=1, max_new_tokens=2)
    assert read("asked.jsonl")[0]["prompt_ids"] == on
    code = re.search(r"apply_chat_template\((.*)\)\n", Path("run/model/README.md").read_text())
    assert code
    assert "think=True" in code[1]
    rows = [{"prompt": "question 0", "completion": "good 0"}]
    model = run.policy.causal
    with_thinking, without = (
        valence.logprobs(model, rows, tokenizer=tokenizer, chat_template_kwargs=kwargs)
        for kwargs in ({"think": True}, None)
    )
    assert with_thinking[0].logps != pytest.approx(without[0].logps, abs=1e-6)
    with raises_error("run-differs", where="run.dir") as raised:
        valence.train(recipe(), quiet=True)
    assert 'data.chat_template_kwargs: {"think": true} -> {}' in raised.error.message


def test_variables_without_effect_are_errors(place: Path) -> None:
    for name, value in {"thimk": 1, "tools": [], "tokenize": True}.items():
        with raises_error("template-variable-unknown", where=f"data.chat_template_kwargs.{name}"):
            prepared(chat_template_kwargs={name: value})
    with raises_error("chat-template-missing", where="data.chat_template_kwargs.think"):
        prepared(model="base", chat_template_kwargs={"think": True})


# --- end tokens

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' }}"
    "{{ m['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% "
    "endif %}"
)
GLM = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ "
    "'<|start|>assistant<|channel|>final<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
FAMILIES = {
    "llama": (LLAMA, "<|eot_id|>", "<|eot_id|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    "llama base tokenizer": (
        LLAMA,
        "<|eot_id|>",
        "<|end_of_text|>",
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "qwen2.5": (CHATML, "<|im_end|>", "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "gpt-oss": (HARMONY, "<|return|>", "<|return|>", ["<|return|>", "<|endoftext|>", "<|call|>"]),
    "glm": (GLM, "<|user|>", "<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
}
"""Template, the token that ends a turn, the tokenizer's end-of-sequence token, and the generation
config's.
"""


@pytest.mark.parametrize(("family", "rows"), [
    pytest.param("llama", "chats.jsonl", marks=pytest.mark.slow),
    ("llama base tokenizer", "pairs.jsonl"),
    pytest.param("qwen2.5", "pairs.jsonl", marks=pytest.mark.slow),
    ("gpt-oss", "chats.jsonl"),
    ("glm", "pairs.jsonl"),
    pytest.param("llama", "pairs.jsonl", marks=pytest.mark.slow),
    pytest.param("llama base tokenizer", "chats.jsonl", marks=pytest.mark.slow),
    pytest.param("qwen2.5", "chats.jsonl", marks=pytest.mark.slow),
    pytest.param("gpt-oss", "pairs.jsonl", marks=pytest.mark.slow),
    pytest.param("glm", "chats.jsonl", marks=pytest.mark.slow),
])  # fmt: skip
def test_every_end_token_is_used_everywhere(family: str, rows: str, place: Path) -> None:
    template, end, eos, named = FAMILIES[family]
    tokenizer: Any = tokenizer_of(template, eos=eos, stops=named)
    model: Any = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32, eos_token_id=None)
    stops = tokenizer.convert_tokens_to_ids(named)
    model.generation_config = GenerationConfig(eos_token_id=stops)
    model.save_pretrained("many")
    tokenizer.save_pretrained("many")
    run = build_run(recipe("many", rows=rows), quiet=True)
    encoder, last = run.prepared.encoder, tokenizer.convert_tokens_to_ids(end)
    assert set(encoder.end_ids) == {*stops, tokenizer.eos_token_id, last}
    assert encoder.end_ids[0] == last
    for unit in run.prepared.corpora["train"].units:
        assert all(
            answer.ids[-1] == last and answer.mask[-1] and answer.complete
            for answer in unit.answers
        )
    run.model_writer.write(Path("out"), "auto")
    assert set(GenerationConfig.from_pretrained("out").eos_token_id) == set(encoder.end_ids)
    assert f"{end} ({last})" in _shown(run.prepared)


def _shown(result: Prepared) -> str:
    console = Console(record=True, width=200)
    show_audit(result, console)
    return console.export_text()


def test_an_answer_that_ends_at_any_of_them_is_finished(place: Path) -> None:
    tokenizer = tiny_tokenizer()
    stops = list(range(5, len(tokenizer)))  # nearly every token ends an answer
    model: Any = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32)
    model.generation_config.eos_token_id = stops
    model.save_pretrained("chat")
    run = build_run(recipe(), quiet=True)
    assert {*stops} <= {*run.prepared.encoder.end_ids}
    result = run.sample(["question 0", "question 1"], Sampling(max_new_tokens=8, seed=1), 4)
    answers = [answer for several in result for answer in several if answer.tokens[-1] in stops]
    assert answers
    assert {answer.stop for answer in answers} == {"eos"}
    inputs = valence.api.build_run(
        {**recipe(), "run": {"dir": "given"}}, model=model, tokenizer=tokenizer, quiet=True
    )
    assert {*stops} <= {*inputs.prepared.encoder.end_ids}


def test_plain_text_ends_with_the_tokenizers_end_token(place: Path) -> None:
    result = prepared(as_chat=False)
    eos = tiny_tokenizer().eos_token_id
    assert result.encoder.end_ids[0] == eos
    assert all(
        answer.ids[-1] == eos for unit in result.corpora["train"].units for answer in unit.answers
    )


def test_the_models_configuration_names_them_where_there_is_no_generation_config(
    place: Path,
) -> None:
    folder = Path("chat")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 7]}))
    assert generation_stops("chat") == (7, 9)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert generation_stops("chat") == (7,)
    (folder / "generation_config.json").unlink()
    assert generation_stops("chat") == (2,)
    assert generation_stops("no/such") == ()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [2, 100_000]}))
    assert 100_000 not in prepared().encoder.end_ids  # no token of this tokenizer
