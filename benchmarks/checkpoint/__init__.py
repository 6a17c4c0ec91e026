"""The cost of checkpoints."""

from benchmarks.step import THREADS

__all__ = ["THREADS"]  # set before torch is imported
