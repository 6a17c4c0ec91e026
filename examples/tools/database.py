"""An environment that answers questions: a SQLite database that the model may only read.

Each row has the columns ``schema`` (SQL that creates and fills the tables) and ``answer``. The
model ends its work with the tool ``submit``. The reward is 1 for the right answer.
"""

from __future__ import annotations

import sqlite3
from typing import Any

MAX_ROWS = 50
ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)


def authorize(action: int, *_: Any) -> int:
    """Let SQLite run statements that only read."""
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


class Database:
    def reset(self, schema: str, answer: str, **row: Any) -> str:
        self.connection = sqlite3.connect(":memory:")
        self.connection.executescript(schema)
        query = "SELECT sql FROM sqlite_master WHERE type = 'table'"
        tables = "\n".join(sql for (sql,) in self.connection.execute(query))
        self.connection.set_authorizer(authorize)
        self.answer = answer
        self.submitted = ""
        return f"\n\nThe tables of the database:\n{tables}"

    def query(self, sql: str) -> list[list[Any]]:
        """Run a query, and return the first 50 rows of its result.

        Args:
            sql: One SELECT statement of SQLite.
        """
        return [list(record) for record in self.connection.execute(sql).fetchmany(MAX_ROWS)]

    def submit(self, answer: str) -> str:
        """Submit the answer to the question. The last one counts.

        Args:
            answer: The answer, as short as possible.
        """
        self.submitted = answer
        return "submitted"

    def get_reward(self) -> float:
        return float(self.submitted.strip() == self.answer.strip())

    def close(self) -> None:
        self.connection.close()
