"""On the path of a vLLM server: its processes are copies of the first, which has loaded what they
need. By itself each of the three loads PyTorch and vLLM anew, which is most of what a start of a
tiny model takes.
"""

import multiprocessing
from typing import Any

_context = multiprocessing.get_context


def _forking(method: str | None = None) -> Any:
    return _context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forking
