"""Labels that a good order of labelling saves."""
