"""The model card: facts only, loadable as the hub loads it, and text that stays text."""

import ast
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from valence.report.card import CardFacts, fenced, markdown, model_card, table

HOSTILE = "a | b\n# head\n<script>alert(1)</script> [x](javascript:1) ![i](u) **b** _e_ `c` ``` $m$ a_b \x1b[2J \ud800 \\"

FACTS = CardFacts(
    name="first",
    base_model="org/tiny-chat",
    method="kto",
    loss={"beta": 0.1, "desirable_weight": 1.0},
    settings={"train.learning_rate": 1.23456e-5},
    adapter=False,
    chat=True,
    audit={
        "rows": 203,
        "classes": {"thumbs up": 104, "thumbs down": 96},
        "unused": [{"kind": "bad", "reason": "no completion", "count": 3, "rows": ("feedback.jsonl:7",)}],
        "files": ({"path": "feedback.jsonl", "format": "judgement", "rows": 203},),
    },
    before={"auc": 0.5, "kl": 0.0},
    after={"auc": 0.81, "kl": 0.2},
    license="apache-2.0",
    command="valence train recipe.yaml",
    versions={"valence": "0.1.0", "torch": "2.13"},
    steps=120,
    seconds=192.4,
)


def html(card):
    return MarkdownIt("commonmark").enable("table").render(card.split("\n---\n", 1)[1])


def test_the_card_tells_what_why_and_how():
    out = html(model_card(FACTS))
    assert "A fine-tuned version of org/tiny-chat, trained by Valence with the method <strong>kto</strong>" in out
    assert "120 optimizer steps (3m12s)" in out
    for row in (
        ("loss.beta", "0.1"),
        ("train.learning_rate", "1.23456e-05"),
        ("thumbs up", "104"),
        ("torch", "2.13"),
        ("feedback.jsonl", "judgement", "203"),
        ("auc", "0.5", "0.81", "+0.31"),
    ):
        assert "<tr>\n" + "".join(f"<td>{cell}</td>\n" for cell in row) + "</tr>" in out
    assert '<code class="language-sh">valence train recipe.yaml\n</code>' in out
    assert "<li>Training rows: 3 rows were not used: no completion; such as feedback.jsonl:7</li>" in out


def test_the_head_is_what_the_hub_reads():
    data = ModelCard(model_card(FACTS)).data
    assert (data.base_model, data.library_name, data.license) == ("org/tiny-chat", "transformers", "apache-2.0")
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["valence", "kto"]
    adapter = ModelCard(model_card(replace(FACTS, adapter=True, license=None))).data
    assert (adapter.library_name, adapter.license, adapter.tags) == ("peft", None, ["valence", "kto", "lora"])
    assert adapter.to_dict()["base_model_relation"] == "adapter"


@pytest.mark.parametrize("folder", ["/models/mine", "./mine", "../mine", "a/b/c", "", "C:\\mine"])
def test_a_folder_is_not_given_to_the_hub_as_a_base_model(folder):
    assert "base_model" not in ModelCard(model_card(replace(FACTS, base_model=folder))).data.to_dict()


@pytest.mark.parametrize(("adapter", "chat"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_example_is_python_for_this_model(adapter, chat):
    card = model_card(replace(FACTS, adapter=adapter, chat=chat))
    code = card.split("```python\n")[1].split("\n```")[0]
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert ("AutoPeftModelForCausalLM" in names) == adapter
    assert ("apply_chat_template" in code) == chat


@pytest.mark.parametrize("chat", [True, False])
def test_a_reward_model_is_shown_scoring(chat):
    card = model_card(replace(FACTS, reward_model=True, chat=chat))
    code = card.split("```python\n")[1].split("\n```")[0]
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert "AutoModelForSequenceClassification" in names
    assert "generate" not in code
    assert ModelCard(card).data.pipeline_tag == "text-classification"


def test_limitations_are_facts_of_the_run():
    assert "## Limitations" not in model_card(replace(FACTS, audit={}))
    out = html(model_card(replace(FACTS, audit={}, before=None, after=None, finished=False)))
    assert "<li>The training was stopped before its end, after 120 optimizer steps.</li>" in out
    assert "<li>The model was not evaluated on held-out rows.</li>" in out
    assert "Results" not in out


def test_hostile_text_stays_text_and_tables_keep_their_columns():
    audit = {"rows": [{"a": HOSTILE, HOSTILE: 1}], "findings": {"other": {"count": 1, "rows": [HOSTILE]}}}
    facts = replace(
        FACTS,
        name=HOSTILE,
        base_model=HOSTILE,
        method=HOSTILE,
        license=HOSTILE,
        command=HOSTILE,
        audit=audit,
        before={HOSTILE: 1.0},
        after={HOSTILE: 2.0},
    )
    card = model_card(facts)
    card.encode("utf-8")
    ModelCard(card)
    assert "\x1b" not in card
    out = html(card)
    for tag in ("<script", "<a ", "<img", "<em>"):
        assert tag not in out
    assert out.count("<h1>") == 1
    shown = (
        "a | b # head &lt;script&gt;alert(1)&lt;/script&gt; [x](javascript:1) ![i](u) **b** _e_ `c` ``` $m$ a_b "
        "\N{SYMBOL FOR ESCAPE}[2J \N{REPLACEMENT CHARACTER} \\"
    )
    assert f"<td>{shown}</td>\n<td>1</td>\n<td>2</td>\n<td>+1</td>\n</tr>" in out
    assert f"<td>{shown}</td>\n<td>1</td>\n</tr>" in out
    assert f"<li>Training rows: other (1); such as {shown}</li>" in out


def test_a_fence_is_longer_than_any_in_the_code():
    assert fenced("a ```` b", "sh").startswith("`````sh\n")


def test_a_table_without_rows_is_nothing():
    assert table(("a",), []) == ""
    assert markdown(None) == "\N{EN DASH}"
