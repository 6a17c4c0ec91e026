"""Kill training processes at any moment, and compare the result with an undisturbed run."""
