"""Speed and memory of one training step: Valence and TRL on the same model, rows, precision and
threads, step by step in turn.
"""

import os
import sys

THREADS = 2
if "torch" not in sys.modules:
    # torch reads them when it is imported. Threads of one side that wait by spinning would slow the
    # other side.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
