"""The report: one HTML file that shows a run, from its folder alone.

`collect` reads the folder, `sentences` describes the run in words, `document` is everything as
plain JSON, and `page` embeds that with the script that draws it. It needs neither torch nor a
network, and works for a folder in any state: the page lists what is missing.
"""

from paceline.show.report.page import RunView, write

__all__ = ["RunView", "write"]
