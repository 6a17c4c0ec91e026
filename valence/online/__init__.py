"""Rounds of online training: sample completions, score them, make examples of them."""
