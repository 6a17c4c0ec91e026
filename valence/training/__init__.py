"""A run from its recipe to its model: prepare, estimate, load, train, save and resume."""
