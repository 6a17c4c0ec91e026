"""Memory of each process of a sharded run."""
