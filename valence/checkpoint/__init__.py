"""Saved state, and models written for others to load."""
