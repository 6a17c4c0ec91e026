"""The test plan of a GPU in one command."""
