"""Links out of docs/ work on a code host by themselves.

In the site what they name in the repository is a page with its text.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)\s#]+)(?:#[^)\s]*)?")
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".sbatch": "bash",
    ".md": "markdown",
    ".jsonl": "json",
}


def outside(page: str, path: str) -> Path | None:
    """What a page links in the repository, unless it is a page itself or nothing is there."""
    target = (ROOT / "docs" / page).parent.joinpath(path).resolve()
    return target if target.exists() and ROOT / "docs" not in (target, *target.parents) else None


def name_of(path: Path) -> str:
    return f"repository/{path.relative_to(ROOT).as_posix()}.md"


def shown(path: Path) -> str:
    if path.is_dir():
        return "\n".join(shown(entry) for entry in sorted(path.iterdir()) if entry.is_file())
    language, text = LANGUAGES.get(path.suffix, "text"), path.read_text(encoding="utf-8")
    return f"# {path.relative_to(ROOT)}\n\n`````{language}\n{text}\n`````\n"


def on_files(files: Any, config: Any) -> Any:
    for page in list(files.documentation_pages()):
        for link in LINK.finditer(page.content_string):
            if (path := outside(page.src_uri, link["path"])) and name_of(
                path
            ) not in files.src_uris:
                files.append(File.generated(config, name_of(path), content=shown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def moved(link: re.Match[str]) -> str:
        path, up = (
            outside(page.file.src_uri, link["path"]),
            len(PurePosixPath(page.file.src_uri).parents) - 1,
        )
        return link[0] if path is None else f"]({'../' * up}{name_of(path)}"

    return LINK.sub(moved, markdown)
