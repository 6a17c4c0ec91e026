"""Training: the table of methods, the step, and the loop around it."""
