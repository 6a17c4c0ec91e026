"""The guides name existing settings, methods, formats and metrics, and their rows are read as
stated.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from examples.demo import assets
from tests.docs.blocks import FENCED, ROOT
from tests.docs.settings import is_setting
from valence.config.describe import settings_table
from valence.config.schema import Recipe, SourceSettings
from valence.data.format_table import FORMATS
from valence.data.load import load
from valence.methods import METHODS, ONLINE

PAGE = ROOT / "docs" / "coming-from.md"
GUIDES = [
    PAGE,
    *(ROOT / "docs" / name for name in ("train/methods.md", "train/watch.md", "security.md")),
]
CODE = re.compile(r"`([^`]+)`")
SETTING = re.compile(r"(?P<name>[a-z_]+(?:\.(?:[a-z_0-9]+|N))+)(?::? (?P<value>.+))?")
FILE = re.compile(r"\.(py|json|yaml|html)$")
SECTIONS = {row.name.split(".")[0] for row in settings_table()}


def tables(page: Path) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table of a page, as cells."""
    results: list[tuple[list[str], list[list[str]]]] = []
    lines = [*page.read_text(encoding="utf-8").splitlines(), ""]
    inside: list[list[str]] = []
    for line in lines:
        if line.startswith("|"):
            inside.append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
        elif inside:
            results.append((inside[0], inside[2:]))
            inside = []
    return results


def column(page: Path, *headers: str) -> list[str]:
    """What stands in code in the columns with these headers."""
    cells = [
        row[header.index(name)]
        for header, rows in tables(page)
        for name in headers
        if name in header
        for row in rows
    ]
    return [code for cell in cells for code in CODE.findall(cell)]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def named(page: Path) -> list[tuple[str, str | None]]:
    """The settings that a page names in code, each with the value that it gives there.

    Their names begin with a section's.
    """
    ours = column(page, "Valence", "its settings") if page == PAGE else CODE.findall(prose(page))
    results = [SETTING.fullmatch(code) for code in ours]
    return [
        (m["name"], m["value"])
        for m in results
        if m and m["name"].split(".")[0] in SECTIONS and not FILE.search(m["name"])
    ]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_setting_exists_and_takes_what_it_is_given(page: Path) -> None:
    result = named(page)
    assert len(result) > (100 if page == PAGE else 5)
    # of OpenRLHF, in its column of settings
    theirs = {
        "model.beta",
        "model.label_smoothing",
        "model.nll_loss_coef",
    }
    assert [name for name, _ in result if not is_setting(name) and name not in theirs] == []
    for name, value in result:
        if value is not None:
            takes(name, value)


def takes(name: str, value: str) -> None:
    """Raises unless the setting takes the value. Of a loss, some method's must."""
    inputs: Any = YAML(typ="safe", pure=True).load(value)
    section, _, rest = name.partition(".")
    if section != "loss":
        for part in reversed(rest.split(".")):
            inputs = [{"reward": "vader"} | inputs] if part == "N" else {part: inputs}
        full = {"method": "sft", "model": {"name": "a/b"}}
        inside = inputs if isinstance(inputs, list) else {**full.get(section, {}), **inputs}  # type: ignore[dict-item]
        Recipe.model_validate_json(json.dumps({**full, section: inside}), strict=True)
        return
    for method in (*METHODS.values(), *ONLINE.values()):
        try:
            method.settings.model_validate_json(json.dumps({rest: inputs}), strict=True)
        except ValidationError:
            continue
        return
    raise AssertionError(f"no method takes {name}: {value}")


def test_every_method_format_and_number_exists() -> None:
    methods, formats, numbers = (column(PAGE, name) for name in ("method", "format", "in the log"))
    assert methods
    assert [name for name in methods if name not in METHODS and name not in ONLINE] == []
    assert formats
    assert [name for name in formats if name not in FORMATS] == []
    assert numbers
    message = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("metrics.md", "online/training.md")
    )
    assert [name for name in numbers if f"`{name}`" not in message] == []


def test_every_method_and_number_that_the_other_guides_name_exists() -> None:
    for guide in GUIDES[1:]:
        text = guide.read_text(encoding="utf-8")
        links = re.findall(r"\]\(((?:\.\./)?losses/[a-z-]+\.md)#([a-z_]+)\)", text)
        assert [
            (guide, name)
            for page, name in links
            if f"\n## {name}\n" not in (guide.parent / page).read_text(encoding="utf-8")
        ] == []
    message = "".join(
        (ROOT / "docs" / name).read_text(encoding="utf-8")
        for name in ("metrics.md", "online/training.md", "losses/policy-gradient.md")
    )
    numbers = [
        code
        for code in CODE.findall(prose(ROOT / "docs/train/watch.md"))
        if re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", code)
    ]
    assert len(numbers) > 20
    assert [
        name
        for name in numbers
        if f"`{name}`" not in message and f"`{name.removeprefix('eval/')}`" not in message
    ] == []


def _turns(role: str, message: str) -> list[dict[str, str]]:
    return [{"role": role, "content": message}]


@pytest.mark.parametrize(
    ("row", "kind", "options"),
    [
        (
            {"prompt": "a", "chosen_response": "b", "rejected_response": "c", "chosen_reward": 1},
            "preference",
            {"keys": {"chosen": "chosen_response", "rejected": "rejected_response"}},
        ),
        ({"prompt": "a", "response": "b", "preference": "chosen"}, "judgement", {}),
        (
            {"input": "a", "output": "b"},
            "demonstration",
            {"keys": {"prompt": "input", "completion": "output"}},
        ),
        ({"input": "a", "output": "b", "label": 1}, "judgement", {}),
        (
            {
                "context": _turns("user", "a"),
                "chosen": _turns("assistant", "b"),
                "rejected": _turns("assistant", "c"),
            },
            "preference",
            {"keys": {"prompt": "context"}},
        ),
        (
            {"messages": _turns("user", "a")},
            "prompt",
            {"format": "prompt", "keys": {"prompt": "messages"}},
        ),
        (
            {
                "prompt": [{"from": "user", "content": "a"}],
                "completion": {"from": "assistant", "content": "b"},
                "label": True,
            },
            "judgement",
            {},
        ),
        (
            {
                "prompt_id": 1,
                "prompt": _turns("user", "a"),
                "output": _turns("assistant", "b"),
                "label": 1,
                "reward": 2.0,
                "type": "binary_feedback",
            },
            "judgement",
            {},
        ),
        (
            {"messages": _turns("user", "a") + _turns("assistant", "b"), "label": True},
            "judgement",
            {},
        ),
        (
            {
                "conversations": [{"from": "human", "value": "a"}],
                "chosen": {"from": "gpt", "value": "b"},
                "rejected": {"from": "gpt", "value": "c"},
            },
            "preference",
            {},
        ),
        ({"instruction": "a", "input": "", "output": "b"}, "demonstration", {}),
        (
            {"question": "a", "answer": "b"},
            "demonstration",
            {"keys": {"prompt": "question", "completion": "answer"}},
        ),
        (
            {"system_prompt": "s", "question": "a", "response": "b"},
            "demonstration",
            {
                "format": "alpaca",
                "keys": {
                    "instruction": "question",
                    "output": "response",
                    "system": "system_prompt",
                },
            },
        ),
        (
            {"question": "a", "completion": "b", "label": True},
            "judgement",
            {"keys": {"prompt": "question"}},
        ),
        (
            {"system": "s", "instruction": "a", "completion": "b", "label": True},
            "judgement",
            {"format": "alpaca_kto", "keys": {"output": "completion", "kto_tag": "label"}},
        ),
        (
            {"completion": _turns("user", "a") + _turns("assistant", "b"), "label": True},
            "judgement",
            {"keys": {"messages": "completion"}},
        ),
        (
            {"system": "s", "question": "a", "chosen": "b", "rejected": "c"},
            "preference",
            {"format": "alpaca_preference", "keys": {"instruction": "question"}},
        ),
        ({"input": "a", "chosen": "b", "rejected": "c"}, "preference", {}),
        (
            {
                "messages": _turns("user", "a"),
                "chosen": {"role": "assistant", "content": "b"},
                "rejected": {"role": "assistant", "content": "c"},
            },
            "preference",
            {"keys": {"prompt": "messages"}},
        ),
    ],
    ids=[
        "nemo dpo",
        "nemo kto",
        "input output",
        "openrlhf kto",
        "colossal pairs",
        "colossal prompts",
        "colossal kto",
        "halos",
        "llama-factory kto demo",
        "llama-factory dpo demo",
        "llama-factory alpaca demo",
        "llama-factory columns",
        "axolotl open orca",
        "axolotl kto intel",
        "axolotl kto argilla",
        "axolotl kto argilla chat",
        "axolotl dpo intel",
        "axolotl dpo icr",
        "axolotl dpo chat template",
    ],
)
def test_rows_are_read_as_the_guides_say(
    row: dict[str, Any], kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert len(load([SourceSettings(path=str(path), **options)], kind).examples) == 1


@pytest.mark.real
def test_the_data_sets_of_llama_factory_load_without_a_setting() -> None:
    """The files of the table in the guide, from the published archive."""
    try:
        folder = assets.llamafactory_data()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"the archive cannot be fetched: {error}")
    [rows] = [
        rows for header, rows in tables(PAGE) if header == ["file in `data/`", "rows", "format"]
    ]
    assert len(rows) == 3
    for file, count, name in rows:
        format_name = name.strip("`")
        kind: Any = FORMATS[format_name].gives
        loaded = load([SourceSettings(path=str(folder / file.strip("`")))], kind)
        assert loaded.files[0].format == format_name
        assert len(loaded.examples) == loaded.files[0].rows == int(count)
