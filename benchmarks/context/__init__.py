"""Activations of processes that share the tokens of a row."""
