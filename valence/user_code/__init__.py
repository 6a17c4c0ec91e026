"""Code from outside of Valence: load it, call it, and record what it depends on."""
