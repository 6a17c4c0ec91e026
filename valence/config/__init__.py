"""Recipes: the settings a run is made of, and how they are read. Imports no torch."""
