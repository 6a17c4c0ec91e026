"""On the path of a vLLM server: its processes are copies of the first, which has loaded their
libraries. Otherwise each of the three loads PyTorch and vLLM, which is most of the start of a tiny
model.
"""

import multiprocessing
from typing import Any

_context = multiprocessing.get_context


def _forking(method: str | None = None) -> Any:
    return _context("fork" if method == "spawn" else method)


multiprocessing.get_context = _forking
