"""Who gets what: one order, dealt to the ranks like cards.

Round after round every rank takes one item, in the order of the ranks, beginning at position
`start`. So rank r's j-th item is the one at position `start + r + j * size`, and after k full
rounds exactly the items before `start + k * size` are gone: that one number is all a resumed
pass needs, whatever its world size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


class Tail(Enum):
    """What becomes of a last round that has fewer items than there are ranks."""

    FILL = "fill"
    """Everyone gets an item: the order begins anew until the round is full."""
    DROP = "drop"
    """Nobody gets an item: the last few are left out."""
    SHORT = "short"
    """The first ranks get an item: each item is dealt exactly once."""


def share(total: int, start: int, rank: int, size: int, tail: Tail) -> range:
    """The positions one rank takes of an order of `total` items, of which `start` are gone.

    With `Tail.FILL` a position may lie past the end; it means the item at `position % total`.
    """
    rounds, left_over = divmod(max(total - start, 0), size)
    takes_one_more = left_over > 0 and (
        tail is Tail.FILL or (tail is Tail.SHORT and rank < left_over)
    )
    first = start + rank
    return range(first, first + (rounds + takes_one_more) * size, size)


def deal(items: Iterable[T], start: int, rank: int, size: int, tail: Tail) -> Iterator[T]:
    """The items of `share()`, from an order that can only be read once and may never end.

    Reads one round ahead at most, because only a full round shows that it is not the last.
    """
    source = iter(items)
    head = list(islice(source, size)) if tail is Tail.FILL else []
    source = _chain(head, source)
    for _ in islice(source, start):
        pass
    while len(turn := list(islice(source, size))) == size:
        yield turn[rank]
    if not turn or tail is Tail.DROP:
        return
    if rank < len(turn):
        yield turn[rank]
    elif tail is Tail.FILL:
        yield head[(rank - len(turn)) % len(head)]


def _chain(head: list[T], rest: Iterator[T]) -> Iterator[T]:
    yield from head
    yield from rest
