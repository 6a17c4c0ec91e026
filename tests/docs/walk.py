"""Execute a page in order in a fresh folder: write its files, and run its commands and Python code.

A block is a file where the paragraph above it names one and ends with a colon, or its first line is
`# name.yaml`. The folder starts with the prerequisites of a page: a tiny model under every model
name of a recipe or command, rows under usual names, and a reward function.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import typer.main
from ruamel.yaml import YAML

from tests.command import command
from tests.docs.blocks import ROOT, Block, blocks, same_output
from tests.docs.third_party import OUTSIDE, Outside, smaller
from tests.programs import Program
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence import cli
from valence.apps.sweep import run as sweep_run

PAGES = [
    "README.md",
    *sorted(
        path.relative_to(ROOT).as_posix()
        for folder in ("docs", "dev")
        for path in (ROOT / folder).rglob("*.md")
    ),
]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
EXTENSIONS = {
    "json": ("jsonl", "json"),
    "yaml": ("yaml",),
    "python": ("py",),
    "text": ("csv", "tsv", "txt"),
}
BY_SHELL = ("cat ", "cp ", "curl ", "head ", "ls", "mkdir ", "mv ", "rm ", "tail ", "wc ")
"""Commands that are run as they stand."""
ASSIGNED = re.compile(r"(\w+)=(?:\$\([^)]*\)|\S*)\s+")
ENDS = re.compile(r"\s(?:\||>|2>|&&|&$)")
"""What follows is the shell's business, or the next program's."""
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=--master-port[ =])\d+")
SHARED = re.compile(r"(?<= |=)/(?=shared/)")
HUB = re.compile(r"[A-Za-z][\w.-]*/[\w.-]*\w")
REWARDS = """
def concise(completions, **context):
    return [-float(len(each.text)) for each in completions]


def polite(completions, **settings):
    return [1.0 if "please" in each.text else 0.0 for each in completions]
"""


@dataclass(frozen=True)
class Line:
    """A logical line of a `sh` block, and where it is."""

    text: str
    page: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def variables(self) -> list[str]:
        """What is set for it alone, as `A` of `A=1 valence report`."""
        return [result.group(1) for result in re.finditer(ASSIGNED, self.text[: self._start])]

    @property
    def words(self) -> list[str]:
        """Those of the `valence` command that is to be run, without `valence`; none if there is
        none.
        """
        return self._plain[1:] if self._plain[:1] == ["valence"] else []

    @property
    def launched(self) -> list[str]:
        """Those of a `valence` command that another program starts, as torchrun does."""
        at = " ".join(self._plain).find(" -m valence ")
        return [] if at < 0 else " ".join(self._plain)[at:].split()[2:]

    @property
    def _start(self) -> int:
        at = 0
        while assigned := ASSIGNED.match(self.text, at):
            at = assigned.end()
        return at

    @property
    def _plain(self) -> list[str]:
        return shlex.split(ENDS.split(self.text[self._start :])[0])


def lines_of(block: Block, page: str) -> Iterator[Line]:
    """Continued lines are one; comments and empty ones are left out."""
    pending, start = "", 0
    for i, text in enumerate(block.text.splitlines()):
        start = start if pending else block.line + i
        pending += text.removesuffix("\\")
        if not text.endswith("\\"):
            if pending.strip() and not pending.lstrip().startswith("#"):
                yield Line(re.sub(r"\s+#\s.*$", "", pending.strip()), page, start)
            pending = ""


def all_lines(page: str) -> list[Line]:
    return [
        line
        for block in blocks((ROOT / page).read_text(encoding="utf-8"), "sh")
        for line in lines_of(block, page)
    ]


def files_of(text: str, block: Block) -> list[str]:
    """The files whose text the block is. A `yaml` block is a recipe; other YAML files are text."""
    extensions = EXTENSIONS.get(block.language, ())
    actual = re.match(r"# ([\w./-]+\.\w+)$", block.text.partition("\n")[0])
    is_task = block.language == "text" and actual and actual[1].endswith(".yaml")
    if actual and (is_task or actual[1].rpartition(".")[2] in extensions):
        return [actual[1]]
    above = text[: block.start].rpartition("```")[0].rstrip().rpartition("\n\n")[2]
    named = re.findall(r"`([\w./-]+\.\w+)`", above) if above.endswith(":") else []
    return [name for name in named if name.rpartition(".")[2] in extensions]


# What is there before


@cache
def model_files() -> dict[str, bytes]:
    """A tiny model with its tokenizer, as files.

    Its answers end after some 6 tokens, however long they may be.
    """
    tokenizer: Any = tiny_tokenizer()
    model: Any = tiny(
        vocab_size=len(tokenizer), layers=1, dtype=torch.float32, max_position_embeddings=1024
    )
    # one number that all states share, and which the end-of-turn token's logit follows
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 8
        model.get_output_embeddings().weight[tokenizer.eos_token_id, 0] = 0.8
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def place_model(name: str) -> None:
    folder = Path(name)
    if not folder.exists():
        folder.mkdir(parents=True)
        for file, content in model_files().items():
            (folder / file).write_bytes(content)


def chat(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def usual_files() -> dict[str, list[dict[str, Any]]]:
    """Rows under the names that pages use, training rows and held-out ones."""
    numbers = range(16)
    prompts = [{"prompt": chat(f"question {i}")} for i in numbers]
    thumbs = [
        {**row, "completion": f"answer {i}", "label": i % 3 > 0}
        for i, row in zip(numbers, prompts, strict=True)
    ]
    pairs = [
        {**row, "chosen": f"answer {i}", "rejected": f"no {i}"}
        for i, row in zip(numbers, prompts, strict=True)
    ]
    shown = [{**row, "completion": f"answer {i}"} for i, row in zip(numbers, prompts, strict=True)]
    results = {"feedback": thumbs, "prompts": prompts, "pairs": pairs, "demonstrations": shown}
    return {f"{name}.jsonl": rows[:12] for name, rows in results.items()} | {
        f"{'held_out' if name == 'feedback' else f'held_out_{name}'}.jsonl": rows[12:]
        for name, rows in results.items()
    }


RECIPE = """\
method: kto
model: {name: HuggingFaceTB/SmolLM2-135M-Instruct, lora: {rank: 16}}
data: {train: feedback.jsonl, eval: held_out.jsonl}
train: {batch_size: 4}
run: {dir: runs/first}
"""


def recipe_of(text: str) -> str:
    """What `recipe.yaml` is on a page that does not name it: its first recipe, or else RECIPE."""
    full = [
        block for block in blocks(text, "yaml") if re.search(r"^method:", block.text, re.MULTILINE)
    ]
    unnamed = [block for block in full if not files_of(text, block)]
    return unnamed[0].text if unnamed else RECIPE


# Going through a page


@dataclass
class Walk:
    """One page in one folder, which is the current one. skips: lines and blocks (by their first
    line) that are not run. added: words put behind a line's own. first: lines that are run before
    all others.
    """

    page: str
    monkeypatch: pytest.MonkeyPatch
    skips: Sequence[str] = ()
    added: dict[str, str] = field(default_factory=dict)
    first: Sequence[str] = ()
    servers: dict[str, Program] = field(default_factory=dict)
    ports: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    outside: Outside = field(init=False)

    def __post_init__(self) -> None:
        self.outside = Outside(self._local)

    def run(self) -> None:
        text = (ROOT / self.page).read_text(encoding="utf-8")
        self._prepare(text)
        for line in self.first:
            self._line(Line(line, self.page, 0))
        every, namespace = blocks(text), {"__name__": "page"}
        for i, block in enumerate(every):
            if files := files_of(text, block):
                for name in files:
                    self._write(name, block.text)
            elif block.language == "sh":
                for line in lines_of(block, self.page):
                    self._line(line)
            elif block.language == "python" and block.text.partition("\n")[0] not in self.skips:
                self._python(text, block, every[i + 1] if i + 1 < len(every) else None, namespace)
        self.outside.finish()

    def end(self) -> None:
        self.outside.end()
        for port in list(self.servers):
            self._stop(port)

    def _prepare(self, text: str) -> None:
        for name, rows in usual_files().items():
            Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._write("my_rewards.py", REWARDS)
        place_model(MODEL)
        place_model("model")
        place_model("cache/smollm2-135m-instruct")
        self._write("recipe.yaml", recipe_of(text))
        # a page may show a file below the command that reads it
        for block in reversed(blocks(text)):
            for name in files_of(text, block):
                self._write(name, block.text)
        shutil.copytree(ROOT / "recipes", "recipes")
        shutil.copytree(ROOT / "examples", "examples")
        Path("shared").symlink_to(".")  # the disk that hosts share

    def _write(self, name: str, text: str) -> None:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._local(text))
        if path.suffix == ".yaml":
            recipe = YAML(typ="safe").load(text)
            for section in ("model", "reference", "teacher"):
                part = recipe.get(section) or {}
                model = (
                    part.get("name" if section == "model" else "model")
                    if isinstance(part, dict)
                    else part
                )
                if model and HUB.fullmatch(model):
                    place_model(model)

    def _port(self, shown: str) -> str:
        """A port that is free here for one that the page names."""
        if shown not in self.ports:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.ports[shown] = str(free.getsockname()[1])
        return self.ports[shown]

    def _local(self, text: str) -> str:
        """With ports that are free here, two processes for many, and a folder for a disk that hosts
        share.
        """
        return PORT.sub(lambda result: self._port(result[0]), smaller(SHARED.sub("", text)))

    def _line(self, line: Line) -> None:
        if line.text in self.skips:
            return
        for name in line.variables:
            self.monkeypatch.setenv(name, "a value of the test")
        added = self.added.get(line.text, "").split()
        words = [*shlex.split(self._local(shlex.join(line.words))), *added]
        if line.words[:1] == ["serve"]:
            self._serve(words)
        elif "--review" in line.words:
            self._review(words)
        elif line.words:
            self._place_files(words)
            if words[0] == "sweep":
                python = self.outside.interpreter()
                self.monkeypatch.setattr(sweep_run, "PROGRAM", (python, "-m", "valence"))
            if "--nproc" in words:
                assert Program(*words, output="said").wait() == 0, (
                    f"{line}: {Path('said').read_text()}"
                )
            else:
                assert command(*words) == 0, line
        elif line.text.startswith(OUTSIDE):
            self.outside.run(line.text, " ".join(added))
        elif line.text.startswith(BY_SHELL):
            subprocess.run(
                ["bash", "-c", f"set -o pipefail; {self._local(line.text)}"], check=True, timeout=30
            )
        else:
            return
        self.done.append(line.text)

    def _place_files(self, words: Sequence[str]) -> None:
        """Put there what a command downloads, and remove what it writes."""
        for word in words[1:]:
            if word[:1].isupper() and HUB.fullmatch(word):
                place_model(word)
        if words[0] == "demo":
            place_model(f"demo/{MODEL}")
        if words[0] == "init" and "--out" not in words:
            Path("recipe.yaml").unlink(missing_ok=True)  # of a page that does not show one

    def _serve(self, words: list[str]) -> None:
        """Starts a server and waits until it says that it serves. It ends with the walk."""
        default = "8000" if words[0] == "serve" else "5000"
        shown = words[words.index("--port") + 1] if "--port" in words else default
        self._stop(shown)  # as the reader would do before another one at the same port
        message = Path(f"said at {shown}")
        message.unlink(missing_ok=True)  # of an earlier server at this port
        self.servers[shown] = server = Program(*words, "--port", self._port(shown), output=message)
        server.wait_until(lambda: message.exists() and "serving" in message.read_text())
        assert any(line.startswith("serving") for line in message.read_text().splitlines()), words

    def _review(self, words: list[str]) -> None:
        """Starts a review and stops it as the reader does in the end, unless it has no rows."""
        message = Path("said by the review")
        message.unlink(missing_ok=True)
        review = Program(*words, "--port", "0", output=message)
        review.wait_until(lambda: message.exists() and "stop with Ctrl-C" in message.read_text())
        review.send_signal(signal.SIGINT)
        assert review.wait(20) in (0, 130), message.read_text()

    def _stop(self, port: str) -> None:
        if server := self.servers.pop(port, None):
            server.send_signal(signal.SIGTERM)
            server.wait(20)

    def _python(
        self, text: str, block: Block, below: Block | None, namespace: dict[str, Any]
    ) -> None:
        out, where = io.StringIO(), f"{self.page}:{block.line}"
        with redirect_stdout(out):
            exec(compile("\n" * (block.line - 1) + block.text, self.page, "exec"), namespace)
        if below and below.language == "text" and not text[block.end + 3 : below.start - 8].strip():
            assert same_output(out.getvalue(), below.text), f"{where} prints\n{out.getvalue()}"
        self.done.append(where)


@cache
def commands() -> dict[str, Any]:
    """The commands of ``valence``, by their names."""
    group: Any = typer.main.get_command(cli.app)
    return group.commands


def parsed(words: Sequence[str]) -> None:
    """Raises an error where the command, or one of its options, does not exist."""
    commands()[words[0]].make_context(words[0], list(words[1:]))
