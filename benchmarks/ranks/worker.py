"""One process of a run: `valence`, and its peak memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from valence.cli import main


def memory(name: str) -> int:
    """Value (bytes) of a line of /proc/self/status."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    import valence.api  # noqa: F401  (so that "program" includes all imports)

    before = memory("VmRSS")
    try:
        main()
    finally:
        note = Path(os.environ["VALENCE_RANK_RECORDS"]) / f"rank-{os.environ['RANK']}.json"
        note.write_text(json.dumps({"program": before, "peak": memory("VmHWM")}))
        sys.stdout.flush()
