"""`python -m valence`: the command line."""

from valence.cli import main

main()
