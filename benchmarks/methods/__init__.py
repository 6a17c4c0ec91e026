"""Every method on real rows: does it move, on held-out rows, what it is meant to move?"""
