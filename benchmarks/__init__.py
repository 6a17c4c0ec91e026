"""Measurements that take longer than a test, or need other software in addition to Valence."""
