"""Compare two models: verdicts on their answers, win rates, assertions, and how far judges agree
with people.
"""
