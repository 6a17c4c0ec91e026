"""The cost of a step by its size."""
