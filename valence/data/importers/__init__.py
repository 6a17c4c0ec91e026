"""Readers of feedback exports, one module per tool, and the rows that are made of their votes."""
