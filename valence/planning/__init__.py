"""Estimates of memory and time before a run, and how its weights are split over processes."""
