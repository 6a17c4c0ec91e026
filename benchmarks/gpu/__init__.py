"""Checks and measurements for the first hours on a GPU: right, fast, and compared with TRL."""
