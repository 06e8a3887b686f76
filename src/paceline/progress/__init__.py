"""One run on a terminal, drawn from plain numbers by one process. No torch in here.

`display` is `Progress`: told what happens, it decides how often to show it, as lines or as JSON.
`screen` is the line at the bottom of a terminal, drawn in this process or by the launcher that
owns the terminal. `text` is the wording.
"""

from paceline.progress.display import Progress

__all__ = ["Progress"]
