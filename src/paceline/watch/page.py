"""The page that a browser is sent, and the scripts and styles that it links."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from paceline.explain.report.page import SCRIPTS, STYLES, asset


def find_assets() -> Mapping[str, str]:
    """What the page links, by name: nothing else is ever sent."""
    return {name: asset(name) for name in (*STYLES, *SCRIPTS)}


def render(name: str, token: str) -> str:
    """The page: its scripts and styles linked, because none may be inline."""
    link = '<link rel="stylesheet" href="/assets/{}?token={}">'
    script = '<script src="/assets/{}?token={}"></script>'
    head = "\n".join(link.format(each, token) for each in STYLES)
    body = "\n".join(script.format(each, token) for each in SCRIPTS)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)} · Paceline watch</title>\n{head}</head>\n"
        f'<body><div id="page"></div>\n{body}</body></html>\n'
    )
