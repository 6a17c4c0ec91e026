"""Recipes: the settings of a run, and how they are read and checked. Imports no torch."""
