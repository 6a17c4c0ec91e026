"""The page on extending Valence: its package is written outside of the repository, and used."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.command import write_place
from tests.docs.blocks import ROOT, blocks
from tests.programs import Program
from valence import cli
from valence.user_code.plugins import plugin_paths

PAGE = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
FILES = {
    match[1]: block.text
    for block in blocks(PAGE)
    if (match := re.match(r"# ([\w./-]+\.\w+)\n", block.text))
}
QUESTIONS = [f"question {i}" for i in range(20)]
ROWS: dict[str, list[dict[str, object]]] = {
    "pairs.jsonl": [
        {"prompt": q, "chosen": f"good {q}", "rejected": f"bad {q}"} for q in QUESTIONS
    ],
    "thumbs.jsonl": [
        {"prompt": q, "completion": f"{word} {q}", "label": word == "good"}
        for q in QUESTIONS
        for word in ("good", "bad")
    ],
    "prompts.jsonl": [{"prompt": q} for q in QUESTIONS[:6]],
    "export.jsonl": [
        {"id": f"{i}", "customer": "c1", "question": q, "reply": "yes", "solved": i % 2 == 0}
        for i, q in enumerate(QUESTIONS)
    ],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, a model and rows; the package is as if installed."""
    folder = tmp_path_factory.mktemp("extend")
    write_place(folder)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for name, rows in ROWS.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [f"{q},reply {i},{1 + i % 5}" for i, q in enumerate(QUESTIONS)]
    (folder / "tickets.csv").write_text("\n".join(["question,agent_reply,csat", *lines]))
    installed = folder / "site" / "mytools-0.1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mytools\nVersion: 0.1\n")
    groups = tomllib.loads(FILES["pyproject.toml"])["project"]["entry-points"]
    sections = (
        "\n".join([f"[{group}]", *(f"{name} = {path}" for name, path in entries.items())])
        for group, entries in groups.items()
    )
    (installed / "entry_points.txt").write_text("\n\n".join(sections))
    return folder


def run(place: Path, main: Callable[[], object], *words: str, status: int = 0) -> str:
    """Call ``main`` in a process that has torch loaded, with the package as if installed."""
    printed = place / "printed"
    with contextlib.chdir(place):
        program = Program(*words, main=partial(_with_package, main), output=printed)
        assert program.wait() == status, printed.read_text()
    return printed.read_text()


def _with_package(main: Callable[[], object]) -> None:
    sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "site")]
    plugin_paths.cache_clear()  # it was called before the package was there
    main()


def valence(place: Path, *words: str, status: int = 0) -> str:
    return run(place, cli.main, *words, status=status)


def installed(place: Path, *words: str) -> str:
    """``valence`` in a process that starts from nothing, and has the names of importers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, place / "site")))}
    done = subprocess.run(
        [sys.executable, "-m", "valence", *words], cwd=place, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_commands_of_the_page(place: Path) -> None:
    commands = [line.split() for block in blocks(PAGE, "sh") for line in block.text.splitlines()]
    assert len(commands) == 7
    for program, *words in commands:
        assert program == "valence"
        valence(place, *words)
    for name in ("shifted", "online", "sampled"):
        assert (place / "runs" / name / "model").is_dir()
    log = [json.loads(line) for line in (place / "mine.txt").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2]
    assert len((place / "feedback.jsonl").read_text().splitlines()) == len(QUESTIONS)
    config = (place / "runs/shifted/config.yaml").read_text()
    assert "mytools.losses:shifted_dpo" in config


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.py", "adapter.py", "loop.py"])
def test_the_programs_of_the_page(place: Path, name: str) -> None:
    output = run(place, partial(runpy.run_path, name, run_name="__main__"))
    if name == "train.py":
        assert "runs/hinge_on_thumbs" in output
    if name == "loop.py":
        assert (place / "loop-model" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_short_names_of_an_installed_package(place: Path) -> None:
    valence(place, "check", "tickets.yaml", "data.train.0.format=tickets")
    output = installed(place, "import", "helpdesk", "export.jsonl", "--out", "feedback.jsonl")
    assert "20 votes read" in output
    words = "rollout.engine=mine", "run.sinks=[{kind: file, project: short}]", "run.dir=runs/short"
    valence(place, "train", "sampled.yaml", *words)
    assert (place / "short.txt").is_file()


@pytest.mark.slow
def test_a_recipe_names_an_importer(place: Path) -> None:
    for name, program in {"helpdesk": installed, "mytools.importer:read": valence}.items():
        words = f"data.train.0.format={name}", "data.train.0.path=export.jsonl"
        output = program(place, "check", "tickets.yaml", "method=apo_zero_unpaired", *words)
        assert ["export.jsonl", name, "20", "10", "10"] in [
            line.split()[:5] for line in output.splitlines()
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tickets.yaml", "data.train.0.format=tickts"), "did you mean tickets?"),
        (("sampled.yaml", "rollout.engine=mime"), "hf, vllm, openai, mine"),
        (("sampled.yaml", "run.sinks=[fil]"), "mlflow, file"),
        (("sampled.yaml", "rollout.engine=mytools.engine:Samplr"), "did you mean Sampler?"),
        (("shifted.yaml", "method=mytools.losses:shifted_dp"), "did you mean shifted_dpo"),
    ],
)
def test_misspelled_names(place: Path, words: tuple[str, ...], expected: str) -> None:
    command = "train" if "Samplr" in words[-1] else "check"
    output = valence(place, command, *words, "run.dir=runs/misspelled", status=2)
    assert expected in " ".join(output.split())


@pytest.mark.slow
def test_a_format_that_fails_names_the_row(place: Path) -> None:
    text = (place / "tickets.csv").read_text()
    (place / "broken.csv").write_text(text.replace("question 3,reply 3,4", "question 3,r,bad"))
    output = valence(place, "check", "tickets.yaml", "data.train.0.path=broken.csv", status=2)
    line = 1 + FILES["mytools/formats.py"].splitlines().index('    good = int(row["csat"]) >= 4')
    assert "broken.csv:5" in output
    assert f"mytools/formats.py:{line}" in output
    (place / "broken.csv").write_text(text.replace("question 0,reply 0,1", "question 0,r,"))
    output = valence(place, "check", "tickets.yaml", "data.train.0.path=broken.csv")
    assert "leaves it out" in output
    (place / "mytools/typo.py").write_text(
        FILES["mytools/formats.py"].replace('"label"', '"lable"')
    )
    words = "data.train.0.format=mytools.typo:tickets"
    output = valence(place, "check", "tickets.yaml", words, status=2)
    assert "did you mean 'label'?" in " ".join(output.split())


BROKEN_ENGINE = """
import mytools.engine as engine

class Few(engine.Sampler):
    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)[:-1]

class Long(engine.Sampler):
    def completion(self, tokens):
        answer = super().completion(tokens)
        object.__setattr__(answer, "tokens", answer.tokens * 100)
        return answer

class Raising(engine.Sampler):
    def generate(self, *args, **kwargs):
        raise KeyError("x")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Few", "Long", "Raising"])
def test_an_engine_that_returns_something_else(place: Path, name: str) -> None:
    (place / "mytools" / "broken.py").write_text(BROKEN_ENGINE)
    words = f"rollout.engine=mytools.broken:{name}", f"run.dir=runs/{name}"
    output = valence(place, "train", "sampled.yaml", *words, status=2)
    assert f"the engine mytools.broken:{name}" in " ".join(output.split())
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('label=row["solved"]', 'label="no"', "the label 'no'"),
        ('label=row["solved"]', "label=-1", "the label -1"),
        ("yield valence.Vote(", "yield dict(", "type dict instead of a Vote"),
        ('row["reply"]', 'row["gone"]', "raised KeyError"),
    ],
)
def test_an_importer_that_yields_something_else(
    place: Path, old: str, new: str, expected: str
) -> None:
    path = place / "mytools" / "importer.py"
    original = path.read_text()
    path.write_text(original.replace(old, new))
    words = "import", "mytools.importer:read", "export.jsonl", "--out", "broken.jsonl"
    output = valence(place, *words, status=2)
    path.write_text(original)
    assert expected in " ".join(output.split())
    assert "Traceback" not in output
