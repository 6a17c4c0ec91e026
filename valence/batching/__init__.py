"""Tokenized examples to micro-batches: shared prefixes, packing, KL pairs, balance across
processes.
"""
