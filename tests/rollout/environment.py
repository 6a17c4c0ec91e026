"""The environment with vLLM, which has a torch and transformers of its own, and the mark of tests that need it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.arch.source import ROOT
from valence.rollout.servers import PYTHON

HERE = Path(os.environ.get(PYTHON, ROOT / ".peers" / "vllm" / "bin" / "python"))
"""Its Python."""
needs_vllm = pytest.mark.skipif(not HERE.exists(), reason="there is no environment with vLLM: `make vllm` builds one")
