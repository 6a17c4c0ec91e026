"""Sweeps: the same recipe trained with several settings and seeds, and compared."""
