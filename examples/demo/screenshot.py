"""Take a screenshot of a run's report: ``python -m examples.demo.screenshot runs/demo --out
docs/images/report.png``.

It needs Chromium, and playwright from the dev extra.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZES = {"desktop": (1180, 860), "phone": (390, 844)}
"""Width and height in CSS pixels."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo.screenshot", description=__doc__)
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        default=Path("runs/demo"),
        help="folder of a run (default runs/demo)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/images/report.png"), help="a .png file"
    )
    parser.add_argument("--size", choices=SIZES, default="desktop")
    parser.add_argument("--dark", action="store_true", help="with the dark colours")
    parser.add_argument(
        "--whole", action="store_true", help="the full page, not only the first screen"
    )
    options = parser.parse_args()
    page = options.run / "report.html"
    if not page.is_file():
        sys.exit(f"there is no {page}: run `make demo` first, or name the folder of another run")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        sys.exit(f"none of {', '.join(NAMES)} is installed")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    width, height = SIZES[options.size]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        view = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if options.dark else "light",
        )
        view.goto(page.resolve().as_uri())
        view.screenshot(path=options.out, full_page=options.whole)
        browser.close()
    print(options.out)


if __name__ == "__main__":
    main()
