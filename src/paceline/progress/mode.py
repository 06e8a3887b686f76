"""How to show a run: decided from what was asked for and from what there is to show it on."""

from __future__ import annotations

from paceline.env import TerminalSettings
from paceline.errors import SettingError

MODES = ("auto", "bar", "plain", "json", "quiet")


def choose_mode(
    wanted: str, *, is_terminal: bool, settings: TerminalSettings, has_rich: bool
) -> str:
    """`bar`, `plain`, `json` or `quiet`.

    What was asked for comes first, then the environment; a bar needs a terminal that can move its
    cursor and somebody who looks at it, and CI is neither.
    """
    if wanted not in MODES:
        raise SettingError(
            f"Progress cannot be shown as {wanted!r}.",
            advice=f"Choose one of {', '.join(MODES)}.",
        )
    chosen = settings.progress if wanted == "auto" and settings.progress else wanted
    if chosen not in MODES:
        raise SettingError(
            f"PACELINE_PROGRESS is {chosen!r}.", advice=f"Choose one of {', '.join(MODES)}."
        )
    if chosen in ("plain", "json", "quiet"):
        return chosen
    is_able = is_terminal and not settings.is_dumb and has_rich
    return "bar" if is_able and (chosen == "bar" or not settings.is_ci) else "plain"
