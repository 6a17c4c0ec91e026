"""Docstrings are plain prose: signs such as the star of a product are not Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

LITERAL = re.compile(r"``?[^`]*``?|[*_<\[\]]")
"""Code between backticks, which stays unchanged, and single signs that Markdown would interpret."""


class Prose(Extension):
    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = LITERAL.sub(
                lambda m: m[0] if len(m[0]) > 1 else f"\\{m[0]}", obj.docstring.value
            )
