"""Check that every method changes its target metric on held-out real rows."""
