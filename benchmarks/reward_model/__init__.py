"""Accuracy and training time of a reward model on film reviews."""
