"""What is replaced in outputs, because it differs each time the same is computed.

Everything else is compared: figures, words, the order of keys and lines, spaces.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatch
from pathlib import Path

STDOUT, STDERR = "stdout", "stderr"
TEXTS = (
    *(STDOUT, STDERR, "*.csv", "*.html", "*.json", "*.jsonl", "*.jinja", "*.keep", "*.lock"),
    *("*.md", "*.txt", "*.yaml", "*/Modelfile*"),
)
"""Files that are recorded as text. Of all others, the SHA-256 is recorded."""
MAX_SCRIPT = 100_000
"""Characters of a script in a page. Of a longer one, a library, the SHA-256 is recorded."""
DURATION = r"(?:\d+h)?(?:\d+m)?\d+(?:\.\d+)?s"


@dataclass(frozen=True)
class Rule:
    """files: patterns of the files that it applies to."""

    reason: str
    files: tuple[str, ...]
    pattern: str
    replacement: str


PRINTED = (STDOUT, STDERR)
RULES = (
    Rule("lines of progress are printed at intervals of time", PRINTED,
         r"(?m)^\w[\w ]*(?: \(\w+\))? (\d+)/(?!\1\b)\d+(?:  .*)?\n", ""),
    Rule("speed", (*PRINTED, "*.html", "*.md"),
         r"[\d,.]+k? (tok|it|rows|prompts|answers)/s", r"<n> \1/s"),
    Rule("age, and the width of its column", PRINTED, rf"{DURATION} ago +", "<age> ago  "),
    Rule("the head of the column of the age", PRINTED, r"(?m)^(run .*  changed) +", r"\1  "),
    Rule("duration", (*PRINTED, "*.html", "*.md"), rf"(?<![\w.]){DURATION}(?!\w)", "<time>"),
    Rule("durations, speeds and memory", (*PRINTED, "*.json", "*.jsonl"),
         r'("(?:seconds|tokens/s|memory)(?:/[^"]*)?": )[\d.e+-]+', r"\1<n>"),
    Rule("what is printed of the memory of the process", (*PRINTED, "*.json"),
         r"program \d+\.\d+ GB", "program <n> GB"),
    Rule("checksum of a file with durations, digests of times, or absolute paths",
         ("*/run.json", "*.about.json", "*.modules.json"), r'("crc": )\d+', r"\1<n>"),
    Rule("digest of the times of files", ("*.about.json",), r'("model_files": )"\w+"', r'\1"<n>"'),
    Rule("curves of durations, speeds and memory in the report of a run", ("*.html",),
         r'("name":"(?:tokens/s|seconds|memory|[^"]*<time>)[^{}]*"y":)\[[^\]]*\]', r"\1[<n>]"),
    Rule("size and checksum of a log with durations", ("*/checkpoints/*/state.json",),
         r'\["(bytes|crc)", \d+\]', r'["\1", <n>]'),
    Rule("checksum and size of the state, and the checksum of both",
         ("*/checkpoints/*/manifest.json",),
         r'("state\.json": \{\s*"bytes": )\d+(,\s*"sha256": )"\w+"', r'\1<n>\2"<n>"'),
    Rule("checksum of a manifest with times", ("*/checkpoints/*/manifest.json",),
         r'(?m)^( "sha256": )"\w+"', r'\1"<n>"'),
    Rule("version of the package", ("*.json", "*.md", "*.html", STDOUT),
         r'("valence": "|\bvalence(?:-align)? )\d+\.\d+\.\d+\w*', r"\1<version>"),
)  # fmt: skip
TIMES = re.compile(r"20\d\d-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?")


@dataclass(frozen=True)
class Normalizer:
    """paths: absolute path -> what replaces it. began, ended: of the recording, in UTC. Times
    between them are replaced; those of rows and exports are not."""

    paths: Mapping[Path, str]
    began: datetime
    ended: datetime

    def file(self, path: Path, name: str) -> str:
        """What is recorded of a file with this name."""
        content = path.read_bytes()
        if any(fnmatch(name, pattern) for pattern in TEXTS):
            return self.text(content.decode("utf-8", "backslashreplace"), name)
        return f"SHA-256 {hashlib.sha256(content).hexdigest()}"

    def text(self, text: str, name: str = STDERR) -> str:
        for folder, replacement in self.paths.items():
            text = text.replace(str(folder), replacement)
        text = TIMES.sub(self._without_time, text)
        for rule in RULES:
            if any(fnmatch(name, pattern) for pattern in rule.files):
                text = re.sub(rule.pattern, rule.replacement, text)
        if name.endswith(".html"):
            text = _without_charts(text)
        return re.sub(r"(?s)(<script[^>]*>)(.*?)(?=</script>)", _without_library, text)

    def _without_time(self, match: re.Match[str]) -> str:
        text = match[0].replace(" ", "T")
        time = datetime.fromisoformat(text).replace(tzinfo=UTC)
        tolerance = timedelta(minutes=1)  # some are rounded to minutes
        is_now = self.began - tolerance <= time <= self.ended + tolerance
        return "<now>" if is_now else match[0]


def _without_charts(text: str) -> str:
    """A comparison of runs without the curves of durations, speeds and memory, which are found by
    the caption of the chart, and without durations on the horizontal axes.
    """
    captions = r'<small>(?:tokens/s|seconds|memory)[^<]*</small></figcaption><div id="(chart\d+)"'
    changing = set(re.findall(captions, text))

    def without(match: re.Match[str]) -> str:
        axes = "y" * (match[1] in changing) + "x" * ("training time (" in match[0])
        return re.sub(rf'"([{axes}])":\[[^\]]*\]', r'"\1":[<n>]', match[0]) if axes else match[0]

    return re.sub(r'(?s)"(chart\d+)":\{.*?(?="chart\d+":|</script>)', without, text)


def _without_library(match: re.Match[str]) -> str:
    if len(match[2]) <= MAX_SCRIPT:
        return match[0]
    return f"{match[1]}SHA-256 {hashlib.sha256(match[2].encode()).hexdigest()}"
