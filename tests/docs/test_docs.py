"""The pages are correct: their code runs, their output matches, and their names exist."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import signal
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.contract import test_contract
from tests.docs import commands, pitfalls, settings
from tests.docs import losses as losses_page
from tests.docs.blocks import NUMBER, ROOT, Block, blocks, executed, refreshed, same_output
from tests.golden import step_formulas, test_paired, test_whole_step
from valence import cli, losses
from valence.cli.explain import Doc, facts, read_doc
from valence.config.load import load_recipe
from valence.data import format_table, formats
from valence.data.format_table import FORMATS
from valence.data.load import InMemory, load
from valence.losses import LOSSES, Loss, preference
from valence.losses.guide import GUIDE
from valence.losses.modifiers import MODIFIERS
from valence.methods import METHODS, Method
from valence.rewards.rules import RULES
from valence.training.signals import OUT_OF_TIME, SIGNALS
from valence.types import Judgement, Origin

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "dev").rglob("*.md"))
)


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


# Blocks


def test_one_batch_prints_what_it_shows() -> None:
    for block, result, shown in executed(text("dev/one-batch.md"), "dev/one-batch.md"):
        assert (shown is None) == (not result), f"dev/one-batch.md:{block.line}"
        if shown is not None:
            assert same_output(result, shown.text), (
                f"dev/one-batch.md:{shown.line} should read\n{result}"
            )


def test_a_wrong_number_is_seen_and_mended() -> None:
    page = "```python\nprint('a', 1 / 3)\n```\n\n```text\na 0.3334\n```\n"
    assert not same_output("a 0.33333", "a 0.3334\n".replace("0.3334", "0.34"))
    assert not same_output("a 0.3333", "b 0.3333")
    assert not same_output("a 1", "a 2")
    assert same_output("a 0.33331\n", "a 0.33333")
    assert refreshed(page.replace("0.3334", "0.5"), "page") == page.replace("0.3334", str(1 / 3))
    assert refreshed(page, "page") == page
    assert NUMBER.findall("a -1.5e-05 2") == ["-1.5e-05"]


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^(\w+):", text("Makefile"), re.MULTILINE))
    named = {
        word
        for page in ("README.md", "CONTRIBUTING.md")
        for block in blocks(text(page), "sh")
        for word in re.findall(r"^make (\w+)", block.text, re.MULTILINE)
    }
    assert named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_what_it_says(page: str) -> None:
    for block in blocks(text(page)):
        where = f"{page}:{block.line}"
        match block.language:
            case "python":
                ast.parse(block.text, where)
            case "yaml" if page != "docs/extend.md":  # `test_extend.py` runs these
                _check_recipe(block)
            case "yaml":
                pass
            case "toml":
                tomllib.loads(block.text)
            case "json":
                assert all(json.loads(line) for line in block.text.splitlines()), where
            case "sh":
                subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
            case other:
                assert other == "text", where


def _check_recipe(block: Block) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(block.text)
        load_recipe(path, training=False)


@pytest.mark.slow
def test_the_loss_of_the_worked_example_passes_the_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The function, the row and the golden of CONTRIBUTING.md, put into the tables and held to what
    every row must satisfy.
    """
    function, row, golden, _ = (block.text for block in blocks(text("CONTRIBUTING.md"), "python"))
    name, result = _added(function, row, monkeypatch)
    for value in ({}, *(test_contract.ON[modifier] for modifier in result.modifiers)):
        test_contract.test_loss_gradient_and_numbers_do_not_depend_on_micro_batches_or_order(
            name, value
        )
    for test in (
        test_contract.test_finite_and_exact_when_policy_equals_reference,
        test_contract.test_prompts_get_no_gradient_and_answers_the_declared_direction,
        test_contract.test_a_weight_multiplies_and_never_divides,
    ):
        test(name)
    of_modifiers = {
        setting for modifier in result.modifiers for setting in MODIFIERS[modifier].settings
    }
    assert METHODS[name].loss.settings.keys() == {"beta", *of_modifiers}
    assert f"## {name}\n" in losses_page.pages()["pairs.md"]
    results = {**vars(step_formulas), **vars(test_paired)}
    exec(golden, results)
    formula, several = results["formula"][name]
    monkeypatch.setitem(test_paired.DIRECTIONS, name, (1, -1))
    for value in several:
        test_paired.test_value_and_gradient(name, formula, value)
        test_paired.test_far_away(name, formula, value)
    test_paired.test_where_a_first_step_goes(name)
    for case in results["by_hand"]:
        test_paired.test_by_hand(*case)
    monkeypatch.setitem(test_whole_step.STEP_FORMULAS, name, results["whole_step"][name])
    for value in (
        {},
        *(on for modifier in result.modifiers for on in test_whole_step.ON[modifier]),
    ):
        test_whole_step.test_a_whole_step_from_logits_to_the_number(name, value)


def _added(function: str, row: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Loss]:
    """The name and the row of a loss, now in the tables."""
    namespace = dict(vars(preference))
    exec(function, namespace)
    for name in re.findall(r"^def (\w+)", function, re.MULTILINE):
        monkeypatch.setattr(preference, name, namespace[name], raising=False)
    namespace = dict(vars(losses))
    exec(row, namespace)
    [(name, result)] = namespace["row"].items()
    assert name not in LOSSES
    monkeypatch.setitem(losses._TABLE, name, result)
    monkeypatch.setitem(METHODS, name, Method(name, result))
    return name, result


# What is named


def test_the_pages_name_every_format_and_exit_status() -> None:
    page = text("docs/feedback/rows.md")
    assert set(FORMATS) <= set(re.findall(r"`([^`\s]+)", page))
    assert settings.shapes() in page
    assert settings.other_names() in page
    section = text("docs/cli.md").split("| Exit status |")[1].split("\n\n")[0]
    assert {int(n) for n in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)} == {
        0,
        1,
        cli.MISTAKE,
        cli.GATE_FAILED,
        OUT_OF_TIME,
        *(128 + number for number in (*SIGNALS, signal.SIGKILL)),
    }


def test_the_page_of_commands_is_up_to_date() -> None:
    assert commands.PAGE.read_text(encoding="utf-8") == commands.page(), (
        "run `python -m tests.docs.commands`"
    )


def test_the_page_of_settings_is_up_to_date() -> None:
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), (
        "run `python -m tests.docs.settings`"
    )


def test_the_pages_of_losses_are_up_to_date_and_have_them_all() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in losses_page.FOLDER.iterdir()}
    assert files == losses_page.pages(), "run `python -m tests.docs.losses`"
    titles = [
        title for text in files.values() for title in re.findall(r"^## (\w+)$", text, re.MULTILINE)
    ]
    assert set(METHODS) == set(LOSSES)
    modifiers = {next(iter(modifier.settings)) for modifier in MODIFIERS.values()}
    assert sorted(titles) == sorted(set(titles))
    assert {*LOSSES, *modifiers} <= set(titles)


def test_the_guide_speaks_of_losses_that_exist() -> None:
    assert set(GUIDE) <= set(LOSSES)
    assert all(guide.when and guide.curves for guide in GUIDE.values())


STARTS = {
    name: re.match(r"The loss starts at (?:[^.]* = |half .*\()?([\d.]+\d|\d+)", g.curves)
    for name, g in GUIDE.items()
}


@pytest.mark.parametrize("name", [name for name, start in STARTS.items() if start])
def test_a_curve_starts_where_the_guide_says(name: str) -> None:
    """One chosen and one rejected answer where policy and reference agree, with the default
    settings.
    """
    loss, settings = LOSSES[name], METHODS[name].resolve({})
    view: dict[str, Any] = dict.fromkeys(loss.reads, torch.zeros(1))
    if METHODS[name].kind == "judgement":
        view = dict.fromkeys(loss.reads, torch.zeros(2)) | {"label": torch.tensor([True, False])}
    view |= {name: torch.ones(1) for name in ("n_w", "n_l") if name in view}
    view |= {"wrong": torch.tensor([settings.get("label_smoothing", 0.0)])}
    result = loss(view, settings)
    value = float(result.sum() if loss.average == "class_mean" else result.mean())
    start = STARTS[name]
    assert start is not None
    assert float(f"{value:.{len(start[1].partition('.')[2])}f}") == float(start[1])


def test_a_loss_without_a_guide_is_explained_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = facts(METHODS["dpo"])
    monkeypatch.delitem(GUIDE, "dpo")
    assert messages.keys() - facts(METHODS["dpo"]).keys() == {"when", "curves"}


def test_formula_and_source_are_told_apart() -> None:
    doc = """A loss of pairs.

    -log s(beta*d), d = r_w - r_l. Smith et al. 2023, arXiv 2305.00000.

    r_w, r_l [P]: log-ratios.

    beta: how steep.
    """
    result = read_doc(doc)
    assert result.summary == "A loss of pairs."
    assert result.formula == "-log s(beta*d), d = r_w - r_l."
    assert result.source == "Smith et al. 2023, arXiv 2305.00000."
    assert result.tensors == "r_w, r_l [P]: log-ratios."
    assert read_doc("One line.\n\nx: a setting.") == Doc("One line.", "", "", "")


def headings(path: Path) -> set[str]:
    """What links may name behind a #."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if target.startswith(("http:", "https:")):
            continue
        name, _, heading = target.partition("#")
        path = folder / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not heading or heading in headings(path), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_that_are_named_exist(page: str) -> None:
    """``path/to/file.py`` and ``path/to/test_file.py::test_name`` in backticks, from the root of
    the repository.
    """
    for path, name in re.findall(
        r"`((?:valence|tests|examples|recipes|docs|dev|benchmarks)/[\w./-]+\.\w+)(?:::(\w+))?`",
        text(page),
    ):
        assert (ROOT / path).is_file(), f"{page}: {path}"
        if name:
            assert name in functions(path), f"{page}: {path}::{name}"


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse(text(path))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_the_page_of_pitfalls_is_up_to_date_and_its_tests_exist() -> None:
    assert pitfalls.PAGE.read_text(encoding="utf-8") == pitfalls.page(), (
        "run `python -m tests.docs.pitfalls`"
    )
    covered = [tests for mistakes in pitfalls.PITFALLS.values() for tests in mistakes.values()]
    assert len(covered) >= 20
    assert all(covered)
    assert [
        test
        for tests in covered
        for test in tests
        if test.partition("::")[2] not in functions(test.partition("::")[0])
    ] == []


def test_the_rows_that_the_page_of_formats_shows_are_read() -> None:
    rows = [
        json.loads(line)
        for line in text("docs/feedback/rows.md")
        .split("```json\n")[-1]
        .split("```")[0]
        .splitlines()
    ]
    kinds = [load([InMemory([row])], kind).files[0].format for row, kind in zip(
        rows, ("judgement", "preference", "judgement", "demonstration"), strict=True
    )]  # fmt: skip
    assert kinds == ["judged_messages", "openai_preference", "judgement", "messages"]


def test_decisions_are_numbered_and_linked() -> None:
    records = sorted(p.name for p in (ROOT / "dev" / "decisions").glob("[0-9]*.md"))
    assert [int(name[:4]) for name in records] == list(range(1, len(records) + 1))
    index = text("dev/decisions/README.md")
    for name in records:
        record = text(f"dev/decisions/{name}")
        assert record.startswith(f"# {name[:4]} ")
        assert re.findall(r"^## (.+)$", record, re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequences",
        ]
        assert f"({name})" in index


def test_every_dependency_has_its_reason() -> None:
    import tomllib

    project = tomllib.loads(text("pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    names = {re.split(r"[\[<>=]", item)[0].lower() for item in wanted} - {"valence-align"}
    record = text("dev/decisions/0001-dependencies.md")
    reasons = {
        name.lower()
        for line in re.findall(r"^\| (.+?) \|", record, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", line)
    }
    assert names == reasons


API = sorted(
    {
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"(?m)^::: (\S+)", page.read_text())
    }
)


def test_the_format_of_the_worked_example_reads_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, block = blocks(text("CONTRIBUTING.md"), "python")
    result = dict(vars(format_table))
    exec(block.text, result)
    monkeypatch.setitem(FORMATS, "vote", result["votes"]["vote"])
    row = {"question": "a", "answer": "b", "vote": "up", "strength": 0.5, "weight": 3}
    example = formats.read_example("vote", row, Origin("rows.jsonl", 1))
    assert isinstance(example, Judgement)
    assert (example.prompt, example.completion) == ("a", "b")
    assert (example.label, example.weight) == (True, 0.5)


def test_every_rule_is_in_both_lists() -> None:
    page = text("docs/online/rewards.md").partition("## Rules")[2].partition("\n## ")[0]
    members = re.search(r"members: \[(exact_match.*)\]", text("docs/api/rewards.md"))
    assert members is not None
    assert set(members[1].split(", ")) == set(RULES)
    assert set(RULES) <= set(re.findall(r"`(\w+)`", page))


@pytest.mark.parametrize("name", API)
def test_objects_of_the_python_reference_exist(name: str) -> None:
    assert pkgutil.resolve_name(name)
