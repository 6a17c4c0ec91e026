"""The same step by Valence and by TRL: same weights, same tokens, float32 on both sides."""
