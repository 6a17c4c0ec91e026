"""Compare the answers of two models."""
