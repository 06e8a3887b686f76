"""The report: one HTML file that shows a run, from its folder alone.

`collect` reads, `sentences` says it in words, `document` is all of it as plain JSON, and `page`
embeds that with the script that draws it. Needs neither torch nor a network, and takes a folder in
any state: the page says what is missing.
"""

from paceline.show.report.page import RunView, write

__all__ = ["RunView", "write"]
