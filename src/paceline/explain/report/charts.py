"""What the page's script draws as curves, and bars of shares; with the legend of either.

A look is a class that sets a colour. A curve travels as numbers, with a sentence that says what is
to be seen in it for whoever cannot see it drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.explain.report.markup import Html, data_block, html, text
from paceline.explain.report.series import Point

DIGITS = 6
"""So many digits of a point are enough to draw it."""


def curve(
    label: str, look: str, points: Sequence[Point], *, dots: bool = False, named: bool = False
) -> dict[str, Any]:
    """One line: `dots` for points that are measurements, `named` for a name at its end."""
    rounded = [[float(f"{value:.{DIGITS}g}") for value in point] for point in points]
    return {
        "label": text(label, 60),
        "look": look,
        "points": rounded,
        "dots": dots,
        "named": named,
    }


def line_chart(
    title: str, curves: Sequence[dict[str, Any]], *, summary: str = "", **options: object
) -> Html:
    """Curves over the same axis, `curve` made each. The options are those of `drawChart`."""
    names = {each["look"]: each["label"] for each in curves if not each["named"]}
    return html(
        '<figure class="chart-box"><figcaption><strong>{}</strong>{}</figcaption>'
        '<p class="said">{}</p>{}</figure>',
        title,
        legend((look, name, "") for look, name in names.items()) if len(names) > 1 else None,
        summary,
        data_block({"title": title, "curves": curves, **options}),
    )


def legend(entries: Iterable[tuple[str, str, str]]) -> Html:
    """Looks with their names and meanings."""
    item = (
        '<li><svg viewBox="0 0 12 12" class="swatch {}" aria-hidden="true">'
        '<rect width="12" height="12" rx="2" class="fill"/></svg><b>{}</b> {}</li>'
    )
    return html('<ul class="legend">{}</ul>', [html(item, *entry) for entry in entries])


def bars(rows: Iterable[tuple[object, Sequence[tuple[str, float, str]], str]]) -> Html:
    """One bar below the other: a name, its pieces (look, share of the width, words), a value."""
    items = []
    for name, pieces, value in rows:
        parts, x = [], 0.0
        for look, share, said in pieces:
            part = '<rect x="{}" width="{}" height="22" class="fill {}"><title>{}</title></rect>'
            parts.append(html(part, x, max(1000 * share - 1.5, 0.8), look, said))
            x += 1000 * share
        item = (
            '<li><span class="bar-label">{}</span><svg viewBox="0 0 1000 22" class="bar" '
            'preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
            '<span class="bar-value">{}</span></li>'
        )
        label = ", ".join(said for *_, said in pieces)
        items.append(html(item, name, label, parts, value))
    return html('<ul class="bars">{}</ul>', items)
