"""The section "workers": how each one's time is spent, as bars and as a table.

A worker's own work is what it does by itself. Waiting is shown hatched, because the time belongs to
whoever is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.explain.report.charts import Share, share_bar, swatch
from paceline.explain.report.collect import OWN_PHASES, PHASES, Rank, Story
from paceline.explain.report.markup import Html, duration, figure, join, percent, table, tag
from paceline.explain.report.words import MEANT_BY_PHASE, find_slow, where_time_went, who_waited

ROWS_LIMIT = 32
"""More workers than this are shown by their extremes."""


def section(story: Story) -> Html | None:
    """The section's content, or None where no worker has said anything."""
    everyone = sorted(story.ranks.values(), key=lambda rank: rank.rank)
    worked = [rank for rank in everyone if rank.steps]
    if not worked:
        return None
    ranks = pick(worked)
    slow = find_slow(story)
    left = len(worked) - len(ranks)
    note = (
        f"{figure(len(worked))} workers took part; shown are the {len(ranks)} whose own work takes "
        "longest and shortest."
    )
    return join(
        [
            tag("p", who_waited(story), class_="verdict " + ("bad" if slow else "good")),
            tag("p", where_time_went(story)),
            tag("p", note, class_="note") if left else None,
            _bars(ranks, slow.rank if slow else None),
            _table(ranks, slow.rank if slow else None),
        ]
    )


def pick(ranks: Sequence[Rank]) -> list[Rank]:
    """All ranks, or the slowest and fastest ones where there are too many."""
    if len(ranks) <= ROWS_LIMIT:
        return list(ranks)
    by_work = sorted(ranks, key=lambda rank: -(rank.own_s or 0))
    half = ROWS_LIMIT // 2
    return sorted([*by_work[:half], *by_work[-half:]], key=lambda rank: rank.rank)


def _bars(ranks: Sequence[Rank], slow: int | None) -> Html | None:
    measured = [rank for rank in ranks if rank.phases]
    if not measured:
        return None
    longest = max(sum(rank.phases.values()) / rank.steps for rank in measured)
    used = [name for name in PHASES if any(rank.phases.get(name) for rank in measured)]
    rows = []
    for rank in measured:
        label = [f"worker {rank.rank}", tag("em", " slow") if rank.rank == slow else None]
        rows.append(
            tag(
                "li",
                tag("span", *label, class_="bar-label"),
                _bar(rank, longest),
                tag("span", duration(sum(rank.phases.values()) / rank.steps), class_="bar-value"),
            )
        )
    legend = [
        tag("li", swatch(f"phase-{name}"), tag("b", name), f" {MEANT_BY_PHASE[name]}")
        for name in used
    ]
    return tag(
        "figure",
        tag("figcaption", tag("strong", "An average step of each worker")),
        tag("ul", *rows, class_="bars"),
        tag("ul", *legend, class_="legend wide"),
    )


def _bar(rank: Rank, longest: float) -> Html:
    spent_by_name = {name: spent for name in PHASES if (spent := rank.phase_s(name))}
    shares = [
        Share(name, spent / longest, f"{name}: {duration(spent)}")
        for name, spent in spent_by_name.items()
    ]
    return share_bar(shares, f"worker {rank.rank}: " + ", ".join(share.said for share in shares))


def _table(ranks: Sequence[Rank], slow: int | None) -> Html:
    names = [name for name in PHASES if any(name in rank.phases for rank in ranks)]
    own = [name for name in names if name in OWN_PHASES]
    others = [name for name in names if name not in OWN_PHASES]
    head = ["worker", "samples", "own work", *own, *others, "time waiting", "verdict"]
    rows = []
    for rank in ranks:
        waited = rank.phases.get("wait")
        share = waited / sum(rank.phases.values()) if waited and rank.phases else None
        verdict = (
            "holds the others up" if rank.rank == slow else "waits" if slow is not None else "even"
        )
        rows.append(
            [
                f"{rank.rank}",
                figure(rank.samples),
                tag("b", duration(rank.own_s)),
                *(duration(rank.phase_s(name)) for name in (*own, *others)),
                percent(share),
                tag("span", verdict if rank.phases else "not measured", class_="keep"),
            ]
        )
    where = {(rank.host, rank.device) for rank in ranks}
    places = None
    if len(where) > 1 or any(device for _, device in where):
        said = sorted(" on ".join(filter(None, (device, host))) for host, device in where)
        places = tag("p", f"They ran on: {', '.join(said[:8])}.", class_="note")
    shown = table(head, rows, caption="Times are averages of one step", words=(0, len(head) - 1))
    return join([shown, places])
