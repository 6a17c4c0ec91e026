"""Compare the results of twenty recipes between two revisions of the package.

    python -m tests.regression record DIR [--tree PATH]
    python -m tests.regression compare DIR_A DIR_B
    python -m tests.regression against REV

The package under test is used through its command line and ``valence.train`` alone, so that both
trees may differ in everything else. Models, rows and recipes are made once, by this tree.
"""
