"""Sentences are judged by what is data in them: names, ranks, numbers, paths. Words may change.

`tests/data/messages.txt` has the words of errors, in one place.
"""

from __future__ import annotations

import re


def says(text: str, *parts: object) -> bool:
    """Whether all parts are in the text, as whole words and in this order."""
    pattern = ".*?".join(rf"(?<!\w){re.escape(str(part))}(?!\w)" for part in parts)
    return re.search(pattern, text, re.DOTALL) is not None
