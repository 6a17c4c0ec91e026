"""A disk that is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from valence.terminal import stream_errors


def limit_file_size(num_bytes: int) -> None:
    """Let this process write no file beyond this size. -1: as much as fits."""
    _, maximum = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, maximum))


@contextmanager
def full_disk(num_bytes: int = 0) -> Iterator[None]:
    """Inside the block, this process writes no file beyond this size.

    The file that pytest captures output in is one of them. What is lost of it is no error of the
    runs of later tests.
    """
    before, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    earlier_errors = dict(stream_errors)
    limit_file_size(num_bytes)
    try:
        yield
    finally:
        limit_file_size(before)
        stream_errors.clear()
        stream_errors.update(earlier_errors)
