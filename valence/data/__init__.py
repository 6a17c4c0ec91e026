"""Data: rows (sources) -> Examples (formats, load) -> TokenizedExamples (encode).

Knows no model and no loss. Every step is pure, every row keeps its place in its file, and nothing
is left out without a count.
"""
