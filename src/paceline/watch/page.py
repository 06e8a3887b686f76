"""The page that a browser is sent, and the scripts and styles that it links."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources

from paceline.explain.report.page import SCRIPTS, STYLES, asset

OWN = ("live.css", "live.js")


def find_assets() -> Mapping[str, str]:
    """What the page links, by name: nothing else is ever sent."""
    folder = resources.files(__package__).joinpath("assets")
    style, script = (folder.joinpath(name).read_text("utf-8") for name in OWN)
    return {
        "page.css": "\n".join([*map(asset, STYLES), style]),
        "page.js": "\n".join([*map(asset, SCRIPTS), script]),
    }


def render(name: str, token: str) -> str:
    """The page: its scripts and styles linked, because none may be inline."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"{asset('head.html')}<title>{escape(name)} · Paceline watch</title>\n"
        f'<link rel="stylesheet" href="/assets/page.css?token={token}">\n'
        f'<script src="/assets/page.js?token={token}" defer></script></head>\n'
        f'<body><a href="#main" class="skip">Skip to the run</a>\n{asset("definitions.svg")}'
        '<div id="page"></div>\n<noscript><p>A script draws this page, and JavaScript is off. '
        f"`paceline report` writes the run as a file.</p></noscript></body></html>\n"
    )
