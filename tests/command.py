"""The command line, called in this process."""

from __future__ import annotations

import sys
from unittest.mock import patch

from valence import cli


def command(*words: str) -> int:
    """The exit status of ``valence`` with these words."""
    with patch.object(sys, "argv", ["valence", *words]):
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
