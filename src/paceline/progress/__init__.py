"""One run on a terminal, drawn from plain numbers by one process.

`Progress` is told what happens and decides how often to say it, and how: `bar` draws with `rich`
on a terminal, `plain` writes lines elsewhere, `json_lines` writes for programs, `silence` keeps
to warnings. Behind a launcher that owns the terminal, `sending` tells it what to draw, and it
draws that on a `screen`. `line` is the live line of both; `speed`, `numbers` and `table` are the
arithmetic and the wording. No torch in here.
"""

from paceline.progress.display import Progress

__all__ = ["Progress"]
