"""Compare a step of Valence with TRL's: same weights, same tokens, float32 on both sides."""
