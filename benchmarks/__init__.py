"""Measurements that take longer than a test, or need other software beside this one."""
