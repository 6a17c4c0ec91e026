"""Number of labels that a good labelling order saves."""
