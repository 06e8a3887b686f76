"""The report: one HTML file that tells a run, from its folder alone.

`collect` reads, `words` says it in sentences, the sections draw it, `page` puts them together.
Needs neither torch nor a network, and takes a folder in any state: the page says what is missing.
"""

from paceline.explain.report.page import write

__all__ = ["write"]
