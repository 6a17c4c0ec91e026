"""``valence`` with trials that ``trial_program.py`` pretends to train."""

import sys
from pathlib import Path

from valence import cli
from valence.apps.sweep import run

run.PROGRAM = (sys.executable, str(Path(__file__).with_name("trial_program.py")))

if __name__ == "__main__":
    cli.main()
