"""Every command of a page exists, and is run or listed in a table with a reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import command
from tests.docs.blocks import ROOT, blocks
from tests.docs.settings import is_setting
from tests.docs.third_party import OUTSIDE
from tests.docs.walk import (
    BY_SHELL,
    PAGES,
    Line,
    Walk,
    all_lines,
    commands,
    files_of,
    lines_of,
    parsed,
)

NOT_RUN: dict[str, dict[str, str]] = {
    "dev/architecture.md": {"*": "`tests/docs/test_architecture.py` compares its output"},
    "docs/extend.md": {"*": "`tests/docs/test_extend.py` runs all of it"},
    "docs/cli.md": {"*": "one example of each command, with its own files; other pages run them"},
    "dev/one-batch.md": {"*": "`tests/docs/test_docs.py` runs its Python"},
    "docs/index.md": {"pip install .": "`tests/docs/test_loop.py` runs it in a copy of the clone"},
    "docs/feedback/collect.md": dict.fromkeys(
        (
            "valence collect runs/first --out feedback.jsonl",
            "valence collect runs/first --out feedback.jsonl --rater anna --rater ben --prompts "
            "prompts.jsonl",
            "valence collect runs/first runs/second --out comparison.jsonl",
        ),
        "`tests/test_cli_collect.py` runs the command",
    ),
    "docs/feedback/import.md": {
        "make open-webui": "`.ci/run` runs it",
        "valence import chats log.jsonl --out log_feedback.jsonl": "`tests/jobs/test_import_rows.py` "
        "imports such a log",
        "python -m examples.open_webui": "`tests/serving/test_open_webui.py` runs it",
        "valence collect HuggingFaceTB/SmolLM2-135M-Instruct --out served.jsonl": "`tests/"
        "test_cli_collect.py` runs the command",
    },
    "docs/start.md": {"*": "`tests/docs/test_loop.py` runs it"},
    "docs/train/models.md": dict.fromkeys(
        (
            "valence check qlora.yaml",
            "valence train qlora.yaml train.max_steps=3 run.dir=runs/measured",
            "valence train qlora.yaml",
        ),
        "it needs a GPU and a data set of the hub; `tests/docs/test_scale.py` plans its recipe",
    ),
    "dev/decisions/0024-no-client-for-triton.md": {"*": "its Python is what was decided against"},
}
"""By page: lines of `sh` blocks, or first lines of Python blocks, that are not run, and why; *:
none of its blocks is. Commands are parsed all the same.
"""

OTHERS: dict[str, str] = {
    "VLLM_SERVER_DEV_MODE=1 ": "`tests/rollouts/test_vllm_server.py` starts its servers by these "
    "lines, where the environment is",
}
"""How lines begin that are run elsewhere, and where."""

LONGER, FEW = "train.max_steps=300", "train.max_steps=2"
HOST = (
    "torchrun --nnodes 2 --node-rank {} --master-addr node1 --master-port 29500 "
    "--nproc-per-node 8 -m valence train recipe.yaml"
)
ADDED: dict[str, dict[str, str]] = {
    "docs/compare.md": {
        "valence compare recipe.yaml runs/first --prompts held_out_prompts.jsonl --judge "
        "my_rewards:concise --at-least 0.5 --out gate": "--at-least 0",
        "valence compare recipe.yaml runs/first --prompts held_out_prompts.jsonl --judge "
        "my_rewards:concise --labels held_out.jsonl --out calibrated": "--allow-below",
        "valence train recipes/reward_model.yaml run.dir=runs/judge": "model.dtype=float32 "
        "train.max_steps=1 data.limit=8",
        "valence train recipe.yaml loss.beta=0.3 run.dir=runs/second": FEW,
    },
    "docs/train/runs.md": {
        "valence train recipe.yaml train.learning_rate=1e-3 --allow train.learning_rate": LONGER,
        "valence train recipe.yaml --allow data.eval --allow eval": LONGER,
        "sbatch examples/slurm/train.sbatch recipe.yaml "
        "run.dir=runs/first": "run.dir=runs/slurm train.epochs=500",
    },
    "docs/online/rewards.md": {
        "valence train recipe.yaml": f"{FEW} train.batch_size=2 rollout.num_rollouts=2"
    },
    "docs/online/training.md": {
        "valence train recipe.yaml": f"{FEW} train.batch_size=2 rollout.num_rollouts=2"
    },
    "docs/scale.md": {
        "torchrun --nproc-per-node 8 -m valence train recipe.yaml": f"run.dir=runs/torchrun {FEW}",
        "accelerate launch --num_processes 8 -m valence train "
        "recipe.yaml": f"run.dir=runs/accelerate {FEW}",
        "kubectl apply -f examples/kubernetes/jobset.yaml": f"run.dir=runs/pods {FEW}",
        "python examples/ray/train.py /shared/recipe.yaml 16 "
        "run.dir=/shared/runs/first": f"run.dir=runs/ray {FEW}",
        HOST.format(0): f"run.dir=runs/hosts {FEW}",
        HOST.format(1): f"run.dir=runs/hosts {FEW}",
    },
}
"""By page and line: words that the test adds to what is shown, since what came before has made the
run longer, or for speed.
"""

FIRST: dict[str, list[str]] = {
    "docs/compare.md": [f"valence train recipe.yaml {FEW}"],
    "docs/feedback/import.md": ["rm feedback.jsonl"],
    "docs/train/hindsight.md": ["rm feedback.jsonl"],
    "docs/train/watch.md": [f"valence train recipe.yaml {FEW}"],
}
"""By page: commands before it, which make what the page speaks of."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def walk(
    request: pytest.FixtureRequest, place: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Walk]:
    page: str = request.param
    actual = Walk(
        page, monkeypatch, tuple(NOT_RUN.get(page, ())), ADDED.get(page, {}), FIRST.get(page, ())
    )
    try:
        yield actual
    finally:
        actual.end()


def has_something_to_run(page: str) -> bool:
    text = (ROOT / page).read_text(encoding="utf-8")
    runs = [
        line
        for line in all_lines(page)
        if line.words or line.text.startswith((*BY_SHELL, *OUTSIDE))
    ]
    python = [block for block in blocks(text, "python") if not files_of(text, block)]
    return bool(runs or python) and "*" not in NOT_RUN.get(page, {})


WALKED = [page for page in PAGES if has_something_to_run(page)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("walk", WALKED, indirect=True)
def test_a_page_works_from_top_to_bottom(walk: Walk) -> None:
    walk.run()
    assert walk.done or NOT_RUN.get(walk.page)
    if walk.page == "README.md":
        for path in promised_files():
            assert list(Path("runs/first").glob(path.replace("N", "*"))), path
        assert Path("demo/run/report.html").exists()


OF_SETTINGS = ("eval/other_text.json",)
"""Paths in the table of the run folder that the runs of README.md have no settings for."""


def promised_files() -> list[str]:
    """The paths in the table of the run folder."""
    page = (ROOT / "docs/train/runs.md").read_text(encoding="utf-8")
    section = page.partition("\n## The run folder\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    paths = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    return [path for path in paths if path not in OF_SETTINGS]


OVERRIDE = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)+)=")


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_settings_exist_and_what_is_not_run_is_told(page: str) -> None:
    known = NOT_RUN.get(page, {})
    for line in all_lines(page):
        command = line.words or line.launched
        if command:
            parsed(command)
        overrides = (
            [] if command[:1] == ["serve"] and "--reward" in command else command
        )  # it takes those of a reward
        for name in (result[1] for word in overrides if (result := OVERRIDE.match(word))):
            assert is_setting(re.sub(r"\.\d+", ".N", name)), f"{line}: there is no setting {name}"
        if not line.words and not line.text.startswith((*BY_SHELL, *OUTSIDE)):
            assert line.text in known or line.text.startswith(tuple(OTHERS)), (
                f"{line}: neither run nor in a table"
            )


def test_the_tables_name_what_is_there() -> None:
    shown = {page: {line.text for line in all_lines(page)} for page in PAGES}
    for page in PAGES:
        python = {
            block.text.partition("\n")[0]
            for block in blocks((ROOT / page).read_text(encoding="utf-8"), "python")
        }
        assert {*NOT_RUN.get(page, {})} - {"*"} <= shown[page] | python, page
        assert ADDED.get(page, {}).keys() <= shown[page], page
    assert {*NOT_RUN, *ADDED, *FIRST} <= set(PAGES)
    every = [line for lines in shown.values() for line in lines]
    assert [begin for begin in OTHERS if not any(line.startswith(begin) for line in every)] == []


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_prose_exist(page: str) -> None:
    """`valence NAME --option` between backticks, where places may stand for words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in reversed(blocks(text)):
        text = text[: block.start] + text[block.end :]
    for message in re.findall(r"`valence ([^`]+)`", text):
        name, *words = message.split()
        assert name in commands(), f"{page}: {message}"
        options = {option for param in commands()[name].params for option in param.opts}
        unknown = {word.partition("=")[0] for word in words if word.startswith("-")} - options
        assert not unknown, f"{page}: `valence {message}` has no {unknown}"


WORD = r"`[a-z]+(?: [A-Z]+)?`"
LIST = re.compile(rf"{WORD}(?:(?:,| and|, and|\n)\s?{WORD})+")


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("dev/")])
def test_commands_in_lists_and_in_tables_of_commands_exist(page: str) -> None:
    """Names of commands without `valence`: in lists of which most are commands, and in the first
    column of tables whose header begins with it.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in LIST.finditer(text):
        names = re.findall(r"`([a-z]+)", match[0])
        unknown = [name for name in names if name not in commands()]
        if 2 * len(unknown) < len(names):
            assert unknown == [], f"{page}: {match[0]}"
    for table in re.findall(r"^\| command\b.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE | re.I):
        cells = (line.split(" | ")[0] for line in table.splitlines())
        names = {name for cell in cells for name in re.findall(r"`([a-z]+)", cell)}
        assert names <= commands().keys(), f"{page}: {names - commands().keys()}"


def test_lines_are_read_as_a_shell_reads_them() -> None:
    (block,) = blocks(
        "```sh\n# a word\nA=1 B=$(x y) valence report \\\n    --json | head  # so\nls\n```\n"
    )
    several, plain = lines_of(block, "page")
    assert several == Line("A=1 B=$(x y) valence report     --json | head", "page", 3)
    assert (several.words, several.variables) == (["report", "--json"], ["A", "B"])
    assert (plain.text, plain.line, plain.words) == ("ls", 5, [])
    assert Line("torchrun --nproc-per-node 8 -m valence train recipe.yaml", "page", 1).launched == [
        "train",
        "recipe.yaml",
    ]
    other = Line("python -m venv .venv", "page", 1)
    assert (other.words, other.launched) == ([], [])


def test_a_block_is_a_file_where_its_name_stands_before_it() -> None:
    yaml = "```yaml\n{}```\n"
    page = (
        "`a.jsonl` and `b.jsonl`:\n\n```json\n{}\n```\n\nSee `c.yaml`.\n\n"
        + yaml.format("# d.yaml\n")
        + "\n`e.py`:\n\n"
        + yaml.format("1\n")
    )
    assert [files_of(page, block) for block in blocks(page)] == [
        ["a.jsonl", "b.jsonl"],
        ["d.yaml"],
        [],
    ]


def test_an_option_that_is_gone_is_seen(place: Path) -> None:
    parsed(["train", "recipe.yaml", "--nproc", "8"])
    with pytest.raises(Exception, match="--processes") as raised:
        parsed(["train", "recipe.yaml", "--processes", "8"])
    assert raised.typename == "NoSuchOption"
    assert command("report", "--jsonl") == 2
