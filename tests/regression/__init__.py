"""Compare runs, outputs and errors between two revisions of the package.

    python -m tests.regression record DIR [--tree PATH]
    python -m tests.regression compare DIR_A DIR_B
    python -m tests.regression against REV
    python -m tests.regression touched

``record`` and ``against`` have three parts: ``recipes`` (weights and logs of twenty runs),
``outputs`` (what commands print and write) and ``errors`` (exit status, code and place for bad
input). ``--parts`` and ``--only`` select some. ``touched`` prints what one step of a run touches.

The package under test is used through its command line and ``valence.train`` alone, so that both
trees may differ in everything else. Models, rows and recipes are made once, by this tree.
"""
