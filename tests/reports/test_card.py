"""The model card: facts only, loadable as the hub loads it, and text that stays text."""

import ast
import json
import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers.utils import hub

from tests.tiny import tiny_tokenizer
from valence.data.audit import audit
from valence.data.encode import Encoder
from valence.data.load import DataFile, load
from valence.reports.card import CardFacts, last_record, license_of, model_card
from valence.reports.rendering import fenced, markdown, markdown_table

SECRET = "ann-wrote-this"
HOSTILE = (
    "a | b\n# head\n<script>alert(1)</script> [x](javascript:1) ![i](u) **b** _e_ `c` ``` "
    "$m$ a_b \x1b[2J \ud800 \\"
)

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
        "unused": [
            {"kind": "bad", "reason": "no completion", "count": 3, "rows": ("feedback.jsonl:7",)}
        ],
        "files": ({"path": "feedback.jsonl", "format": "judgement", "rows": 203},),
    },
    before={"auc": 0.5, "kl": 0.0},
    after={"auc": 0.81, "kl": 0.2},
    last={
        "step": 118,
        "loss": 0.4321,
        "eval/loss": 0.9,
        "test/auc": 0.77,
        "tokens_seen": 9000,
        "lr": 1e-6,
    },
    license={"license": "apache-2.0"},
    command="valence train recipe.yaml",
    versions={"valence": "0.1.0", "torch": "2.13"},
    steps=120,
    seconds=192.4,
)


def html(card):
    return MarkdownIt("commonmark").enable("table").render(card.split("\n---\n", 1)[1])


def sections(card):
    """The HTML of each section by its title. The part above the first one has an empty title."""
    first, *others = html(card).split("<h2>")
    return {"": first} | dict(other.split("</h2>", 1) for other in others)


def items(html):
    """The entries of lists."""
    return [item.split("</li>")[0] for item in html.split("<li>")[1:]]


def test_the_card_has_model_method_steps_settings_and_data():
    card = model_card(FACTS)
    out = html(card)
    assert all(fact in sections(card)[""] for fact in ("org/tiny-chat", "<strong>kto</strong>"))
    assert re.search(r"\b120\b.*\b3m12s\b", out)
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
    [limitation] = items(sections(card)["Limitations"])
    assert all(fact in limitation for fact in ("3", "no completion", "feedback.jsonl:7"))


def test_the_hub_reads_the_head_of_the_card():
    data = ModelCard(model_card(FACTS)).data
    assert (data.base_model, data.library_name, data.license) == (
        "org/tiny-chat",
        "transformers",
        "apache-2.0",
    )
    assert data.pipeline_tag == "text-generation"
    assert data.tags == ["valence", "kto"]
    adapter = ModelCard(model_card(replace(FACTS, adapter=True, license={}))).data
    assert (adapter.library_name, adapter.license, adapter.tags) == (
        "peft",
        None,
        ["valence", "kto", "lora"],
    )
    assert adapter.to_dict()["base_model_relation"] == "adapter"


@pytest.mark.parametrize("folder", ["/models/mine", "./mine", "../mine", "a/b/c", "", "C:\\mine"])
def test_a_folder_is_not_given_to_the_hub_as_a_base_model(folder):
    assert (
        "base_model" not in ModelCard(model_card(replace(FACTS, base_model=folder))).data.to_dict()
    )


@pytest.mark.parametrize(
    ("adapter", "chat"), [(True, True), (True, False), (False, True), (False, False)]
)
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
    assert "Limitations" not in sections(model_card(replace(FACTS, audit={})))
    stopped = sections(model_card(replace(FACTS, audit={}, finished=False)))
    assert "Results on held-out rows" in stopped
    [early] = items(stopped["Limitations"])
    assert "120" in early
    unmeasured = sections(
        model_card(replace(FACTS, audit={}, before=None, after=None, finished=False))
    )
    assert "Results on held-out rows" not in unmeasured
    assert early in items(unmeasured["Limitations"])
    assert len(items(unmeasured["Limitations"])) == 2


def test_held_out_test_and_final_training_numbers_share_a_table():
    parts = sections(model_card(FACTS))
    end = parts["End of training"]
    assert "118" in end
    assert "<td>loss</td>\n<td>0.4321</td>" in end
    assert "<td>lr</td>\n<td>1e-06</td>" in end
    assert not [name for name in ("0.9", "0.77", "9,000") if name in end]
    assert "<td>auc</td>\n<td>0.77</td>" in parts["Results on test rows"]
    bare = sections(model_card(replace(FACTS, last={})))
    assert parts.keys() - bare.keys() == {"End of training", "Results on test rows"}


LICENCE = "Base model and licence"


def test_the_card_names_the_base_model_and_its_licence_where_that_is_known():
    unknown = sections(model_card(replace(FACTS, license={})))[LICENCE]
    known = sections(model_card(FACTS))[LICENCE]
    assert "org/tiny-chat" in unknown
    assert "org/tiny-chat" in known
    assert "apache-2.0" in known
    assert unknown != known.replace("apache-2.0", "")


def test_a_custom_licence_name_is_passed_on():
    message = {
        "license": "other",
        "license_name": "tiny-licence",
        "license_link": "https://example.org/licence",
    }
    card = model_card(replace(FACTS, license=message))
    assert ModelCard(card).data.to_dict() | message == ModelCard(card).data.to_dict()
    shown = sections(card)[LICENCE]
    assert "tiny-licence" in shown
    assert "https://example.org/licence" in shown


@pytest.mark.parametrize(("readme", "config", "result"), [
    ("---\nlicense: mit\ntags: [a]\n---\n# Model\n", None, {"license": "mit"}),
    ("\ufeff---\r\nlicense: mit\r\n---\r\n", None, {"license": "mit"}),
    ("---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---", None,
     {"license": "other", "license_name": "mine", "license_link": "LICENSE"}),
    ("---\ntags: []\n---\n", '{"license": "apache-2.0"}', {"license": "apache-2.0"}),
    (None, '{"license": "apache-2.0"}', {"license": "apache-2.0"}),
    ("# license: mit\n", '{"model_type": "x"}', {}),
    ("---\nlicense: [mit]\n---\n", None, {}),
    ("---\nlicense_name: mine\n---\n", None, {}),
    ("---\n- [\n---\n", "{", {}),
    ("---\n- a\n---\n", "[]", {}),
    (None, None, {}),
])  # fmt: skip
def test_the_licence_of_a_folder_is_that_of_its_card_or_configuration(
    tmp_path, readme, config, result
):
    for name, content in (("README.md", readme), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_bytes(content.encode())
    assert license_of(str(tmp_path)) == result


def test_a_model_that_was_exported_passes_its_licence_on(tmp_path):
    (tmp_path / "README.md").write_text(model_card(FACTS))
    assert license_of(str(tmp_path)) == {"license": "apache-2.0"}


def test_the_card_of_the_hub_is_read_from_the_cache(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    requests = []

    def cached(model, name, **_):
        requests.append((model, name))
        if model == "org/unreachable":
            raise OSError("no network")
        return str(tmp_path / name) if model == "org/kept" else None

    monkeypatch.setattr(hub, "cached_file", cached)
    assert license_of("org/kept") == {"license": "mit"}
    assert license_of("org/unknown") == {}
    assert license_of("org/unreachable") == {}
    assert license_of("./not/a/hub/id") == {}
    assert requests == [
        ("org/kept", "README.md"),
        ("org/unknown", "README.md"),
        ("org/unreachable", "README.md"),
    ]


def test_the_last_record_is_that_of_training_up_to_the_step(tmp_path):
    log = tmp_path / "metrics.jsonl"
    assert last_record(log, 4) == {}
    records = [
        {"step": 2, "loss": 0.6},
        {"step": 4, "loss": 0.5, "eval/loss": 0.7},
        {"step": 4, "test/auc": 0.9},
        {"step": 6, "loss": 0.4},
    ]
    log.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 7, "lo')
    assert last_record(log, 4) == {"step": 4, "loss": 0.5, "eval/loss": 0.7, "test/auc": 0.9}
    assert last_record(log, 6) == records[-1]
    assert last_record(log, 3) == records[0]
    assert last_record(log, 1) == {}


def test_hostile_text_stays_text_and_tables_keep_their_columns():
    audit = {
        "rows": [{"a": HOSTILE, HOSTILE: 1}],
        "findings": {"other": {"count": 1, "rows": [HOSTILE]}},
    }
    facts = replace(
        FACTS,
        name=HOSTILE,
        base_model=HOSTILE,
        method=HOSTILE,
        license={"license": HOSTILE, "license_name": HOSTILE, "license_link": HOSTILE},
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
        "a | b # head &lt;script&gt;alert(1)&lt;/script&gt; [x](javascript:1) ![i](u) **b** _e_ "
        "`c` ``` $m$ a_b "
        "\N{SYMBOL FOR ESCAPE}[2J \N{REPLACEMENT CHARACTER} \\"
    )
    assert f"<td>{shown}</td>\n<td>1</td>\n<td>2</td>\n<td>+1</td>\n</tr>" in out
    assert f"<td>{shown}</td>\n<td>1</td>\n</tr>" in out
    assert any(item.endswith(shown) for item in items(out))


def test_distributions_of_the_audit_are_left_to_the_page():
    audit = {
        "rows": 3,
        "distributions": {"prompt tokens": {"edges": [0, 5], "counts": {"all": [3]}}},
    }
    assert model_card(replace(FACTS, audit=audit)) == model_card(replace(FACTS, audit={"rows": 3}))


def test_a_fence_is_longer_than_any_in_the_code():
    assert fenced("a ```` b", "sh").startswith("`````sh\n")


def test_a_table_without_rows_is_omitted():
    assert markdown_table(("a",), []) == ""
    assert markdown(None) == "\N{EN DASH}"


def test_no_feedback_of_the_training_rows_is_in_the_card(tmp_path):
    """Not in its tables, and not in the reasons of rows that cannot be used."""
    row = {"prompt": "Hi", "completion": "Yo", "label": True, "feedback": SECRET}
    parts = {"comment": SECRET, "follow_up": SECRET}
    rows = [row | {"info": {"comment": SECRET, "feedback": parts}}, row | {"label": None}, row]
    path = tmp_path / "feedback.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    loaded = load([DataFile(path=str(path))], "judgement", on_bad_row="skip")
    encoder = Encoder(tiny_tokenizer(None), max_length=500)
    result = audit(loaded, encoder.encode_all(loaded.examples, loaded.sources), encoder)
    card = model_card(replace(FACTS, audit=result.to_dict()))
    assert "not_converted" in str(result.to_dict())
    assert SECRET not in card
