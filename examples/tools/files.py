"""An environment with state: a small file system in memory.

Each row has the columns ``files`` and ``goal``, both objects with paths and contents. The reward is
the share of the goal's files that have the right content in the end.
"""

from __future__ import annotations

from typing import Any


class FileSystem:
    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.goal: dict[str, str] = {}

    def reset(self, files: dict[str, str], goal: dict[str, str], **row: Any) -> str:
        self.files, self.goal = dict(files), dict(goal)
        return f"\n\nThere are {len(self.files)} files."

    def list_files(self) -> list[str]:
        """List the paths of all files."""
        return sorted(self.files)

    def read_file(self, path: str) -> str:
        """Read a file.

        Args:
            path: The path of the file.
        """
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def write_file(self, path: str, content: str) -> str:
        """Write a file. An existing file is replaced.

        Args:
            path: The path of the file.
            content: The new content.
        """
        self.files[path] = content
        return f"wrote {len(content)} characters"

    def get_reward(self) -> float:
        matches = [self.files.get(path) == content for path, content in self.goal.items()]
        return sum(matches) / len(matches)
