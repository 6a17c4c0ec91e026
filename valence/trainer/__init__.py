"""The table of methods, the optimizer step, the state of a run, and the training loop."""
