"""Make links from docs/ to other files of the repository work in the site.

The links work on a code host unchanged. In the site, each linked file gets a page with its text.
"""

from __future__ import annotations

import json
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


def linked_file(page: str, path: str) -> Path | None:
    """The file outside docs/ that a page links to; None for pages and missing files."""
    target = (ROOT / "docs" / page).parent.joinpath(path).resolve()
    return target if target.exists() and ROOT / "docs" not in (target, *target.parents) else None


def page_name(path: Path) -> str:
    return f"repository/{path.relative_to(ROOT).as_posix()}.md"


def fenced(language: str, text: str) -> str:
    return f"`````{language}\n{text.rstrip()}\n`````\n"


def render(path: Path) -> str:
    """A file, or the files of a folder, as Markdown."""
    if path.is_dir():
        return "\n".join(render(file) for file in sorted(path.iterdir()) if file.is_file())
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return render_notebook(json.loads(text))
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {path.relative_to(ROOT)}\n\n{fenced(language, text)}"


def render_notebook(notebook: dict[str, Any]) -> str:
    """The cells of a notebook, with the text that they printed."""
    parts = list[str]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced("python", source))
        parts += [fenced("text", "".join(output["text"])) for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    for page in list(files.documentation_pages()):
        for link in LINK.finditer(page.content_string):
            path = linked_file(page.src_uri, link["path"])
            if path and page_name(path) not in files.src_uris:
                files.append(File.generated(config, page_name(path), content=render(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    levels_up = len(PurePosixPath(page.file.src_uri).parents) - 1

    def to_site(link: re.Match[str]) -> str:
        path = linked_file(page.file.src_uri, link["path"])
        return link[0] if path is None else f"]({'../' * levels_up}{page_name(path)}"

    return LINK.sub(to_site, markdown)
