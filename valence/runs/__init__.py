"""The folder of a run: its lock, log, checkpoints, signals, and exported models."""
