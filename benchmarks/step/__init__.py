"""Speed and memory of one training step: Valence and TRL on the same model, rows, precision and
threads, step by step in turn.
"""

import os

THREADS = 2
# Before torch is imported, in both processes: threads of the one side that wait by spinning would
# slow the other.
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["OMP_NUM_THREADS"] = str(THREADS)
