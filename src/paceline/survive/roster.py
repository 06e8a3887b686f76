"""Who trains in which generation: the launcher's side of survival, without any process.

Events go in, orders come out, and time is an argument, so that a test can play any sequence of
deaths. `launcher.supervise` feeds it and carries the orders out.

    starting --ready--> waiting --announced--> member --died--> gone, its seat is filled anew
                                                 └--finished, or left as asked--> left --> gone
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

SAME_STEP = 3
"""So many deaths at one step are a bug, not an accident."""
BUG = "that is a bug, not an accident"
NEAR_STEPS = 100
_NO_MEMORY = re.compile(r"MemoryError|out of memory|can't allocate memory", re.IGNORECASE)
START_TRIES = 5
"""So often a replacement may die before it is ready."""
FIRST_BACKOFF_S = 1.0
LOST_GRACE_S = 0.05
"""How long a broken group waits for the news of a death that would explain it."""
LEFT_GRACE_S = 5.0
"""How long those who are left wait for one whose script has left the loop before they did."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell `members`, in rank order, of a generation.

    If it is urgent the last one is broken: whatever they wait for will not come. Otherwise they
    change to it between two steps.
    """

    generation: int
    members: tuple[int, ...]
    is_urgent: bool
    leaving: tuple[int, ...] = ()
    """Those of them that go instead; then follows an urgent one of the others."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker for this seat, at that time."""

    seat: int
    at_s: float


@dataclass(frozen=True, slots=True)
class RestartAll:
    """Nobody is left who knows the state: begin with the newest checkpoint."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End everybody."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No further replacement for this seat; the others continue."""

    seat: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End a replacement for which nothing is left to do."""

    seat: int


Order = Announce | Start | RestartAll | Stop | GiveUp | Dismiss


class _State(Enum):
    STARTING = auto()
    WAITING = auto()
    MEMBER = auto()
    LEFT = auto()
    GONE = auto()


@dataclass(slots=True)
class _Seat:
    state: _State = _State.STARTING
    joined: int = -1
    """The newest generation it has joined."""
    is_new: bool = True
    """Whether its worker has never been in a generation that it had joined in time."""
    failed_starts: int = 0
    is_leaving: bool = False
    """Asked to go between two steps."""


@dataclass(slots=True, kw_only=True)
class Roster:
    """The seats of one run and the worker that sits on each now.

    Invariant: members of a generation are listed oldest first, so that rank 0 and its duties move
    only when the worker that had them is gone; then to one on the same machine as the roster, if
    there is one.
    """

    size: int
    """How many workers are wanted."""
    min_workers: int = 1
    max_replacements: int | None = None
    machine_by_seat: Mapping[int, int] = field(default_factory=dict)
    """Where seats are, if not on machine `here`."""
    here: int = 0
    generation: int = 0
    members: tuple[int, ...] = ()
    """Of the current generation, in rank order."""
    is_held: bool = False
    """Too few are left: they wait for replacements."""
    replaced: int = 0
    is_finished: bool = False
    """A member has done all there was to do, and nobody finishes before all have: no more joins."""
    _seats: dict[int, _Seat] = field(default_factory=dict)
    _lost_at_s: float | None = None
    _is_urgent: bool = True
    """Whether members were told to leave the generation before this one at once."""
    _deaths: Counter[tuple[int, ...]] = field(default_factory=Counter)
    _counted: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.members = tuple(range(self.size))
        self._seats = {seat: _Seat(_State.MEMBER, is_new=False) for seat in self.members}

    @property
    def is_formed(self) -> bool:
        """Whether every member has joined the current generation."""
        return all(self._seats[seat].joined == self.generation for seat in self.members)

    @property
    def has_trained(self) -> bool:
        """Whether somebody ever joined a generation: until then there is nothing to survive."""
        return self.generation > 0 or self.is_formed

    def on_joined(self, seat: int, generation: int) -> list[Order]:
        """A member has the group, and the state, of a generation."""
        place = self._seats[seat]
        place.joined, place.failed_starts = generation, 0
        if seat in self.members and generation == self.generation:
            place.is_new = False
        return self._invite()

    def is_new(self, seat: int) -> bool:
        """Whether a worker is yet to take part: an urgent generation does not wait for it."""
        return self._seats[seat].is_new

    def on_ready(self, seat: int) -> list[Order]:
        """A replacement has built everything and waits to be let in."""
        if self.is_finished:
            return self._dismiss()
        self._seats[seat].state = _State.WAITING
        if self.is_held and len(self.members) + len(self._waiting) >= self.min_workers:
            self.is_held = False
            return [self._announce((*self.members, *self._waiting), is_urgent=True)]
        return self._invite()

    def on_died(
        self, seat: int, *, step: int, how: str, is_kill: bool, now_s: float, ends_run: bool = False
    ) -> list[Order]:
        """A worker ended that should not have, in `step`; `ends_run` if nobody should continue."""
        if ends_run and seat in self.members:
            return [Stop(f"worker {seat} {how}")]
        place = self._seats[seat]
        state, place.state = place.state, _State.GONE
        if state in (_State.LEFT, _State.GONE):
            return []
        was_member = seat in self.members
        if was_member and not self.has_trained:
            return [RestartAll(f"worker {seat} {how} before training began")]
        orders: list[Order] = []
        if was_member:
            if reason := self._count(seat, step, how, is_kill=is_kill):
                return [Stop(reason)]
            orders += self._lose(tuple(each for each in self.members if each != seat))
            if not self.members and self.is_finished:
                return []
            if not self.members:
                return [RestartAll(f"worker {seat}, the last one, {how}")]
        if not place.is_leaving and not self.is_finished:
            orders += self._replace(seat, how, was_member=was_member, now_s=now_s)
        return orders

    def on_machine_gone(self, machine: int) -> list[Order]:
        """A machine is gone or cannot be reached: all its workers at once, and none is replaced."""
        for seat, place in self._seats.items():
            if self.machine_of(seat) == machine:
                is_wanted = place.state not in (_State.LEFT, _State.GONE) and not place.is_leaving
                self.size -= is_wanted
                place.state = _State.GONE
        rest = tuple(seat for seat in self.members if self.machine_of(seat) != machine)
        if rest == self.members:
            return self._stop_if_too_few()
        if not self.has_trained:
            return [RestartAll(f"machine {machine} was lost before training began")]
        orders = self._lose(rest)
        if self.members:
            return orders + self._stop_if_too_few()
        if self.is_finished:
            return []
        return [RestartAll(f"machine {machine}, the last one with workers, was lost")]

    def on_lost(self, seat: int, generation: int, now_s: float) -> list[Order]:
        """A member's group is broken; who died, if anybody did, will be heard of soon.

        Where the next generation waits for the end of a step, others may wait in this one for what
        will not come.
        """
        is_awaited = generation == self.generation - 1 and not self._is_urgent
        if (generation == self.generation or is_awaited) and seat in self.members:
            self._lost_at_s = min(now_s, self._lost_at_s or now_s)
        return []

    @property
    def due_s(self) -> float | None:
        """When to call `on_time`."""
        return None if self._lost_at_s is None else self._lost_at_s + LOST_GRACE_S

    def on_time(self, now_s: float) -> list[Order]:
        """Nobody died: the same members form another group."""
        if self.due_s is None or now_s < self.due_s or self.is_held:
            return []
        return [self._announce(self.members, is_urgent=True)]

    def on_leaving(self, seat: int, now_s: float) -> list[Order]:
        """A worker is asked to go, which it does between two steps, once enough others train."""
        place = self._seats[seat]
        if not place.is_leaving:
            place.is_leaving = True
            self.size -= 1
        return self._fill(now_s) + self._invite()

    def on_left(self, seat: int) -> list[Order]:
        """A member has gone, as it was asked to; its process ends soon."""
        self._seats[seat].state = _State.LEFT
        if seat not in self.members:
            return []
        return self._lose(tuple(each for each in self.members if each != seat))

    def has_left(self, seat: int) -> bool:
        """Whether a worker that takes part no more has still to end."""
        return self._seats[seat].state is _State.LEFT

    def on_gone(self, seat: int) -> None:
        """It has ended: somebody else may have the seat."""
        self._seats[seat].state = _State.GONE

    def on_finished(self, seat: int, *, is_left: bool = False, now_s: float = 0.0) -> list[Order]:
        """A member has done all there was to do; it takes part in nothing any more.

        Where its script has left the loop, the others have a moment to do so too.
        """
        self._seats[seat].state = _State.LEFT
        self.members = tuple(each for each in self.members if each != seat)
        if is_left and self.members:
            self._lost_at_s = self._lost_at_s or now_s + LEFT_GRACE_S
            return []
        self.is_finished, self._lost_at_s = True, None
        return self._dismiss()

    def grow(self, now_s: float) -> list[Order]:
        """One more worker, on the first seat of this machine that is free."""
        if self.is_finished:
            return []
        taken = {seat for seat, each in self._seats.items() if each.state is not _State.GONE}
        here = (number for number in count() if self.machine_of(number) == self.here)
        seat = next(number for number in here if number not in taken)
        self._seats[seat] = _Seat()
        self.size += 1
        return [Start(seat, now_s)]

    def shrink(self, now_s: float) -> list[Order]:
        """One worker less: the youngest goes."""
        staying = [seat for seat in self.members if not self._seats[seat].is_leaving]
        return self.on_leaving(staying[-1], now_s) if staying else []

    def machine_of(self, seat: int) -> int:
        return self.machine_by_seat.get(seat, self.here)

    def _fill(self, now_s: float) -> list[Order]:
        """Others for workers that leave, where too few would be left."""
        return self.grow(now_s) if self.size < self.min_workers else []

    def _dismiss(self) -> list[Order]:
        """Those who have never joined are not waited for."""
        seats = self._seats.items()
        late = [s for s, each in seats if each.joined < 0 and each.state is not _State.GONE]
        for seat in late:
            self._seats[seat].state = _State.GONE
        self.members = tuple(each for each in self.members if each not in late)
        return [Dismiss(seat) for seat in late]

    @property
    def _waiting(self) -> tuple[int, ...]:
        return tuple(s for s, each in self._seats.items() if each.state is _State.WAITING)

    def _invite(self) -> list[Order]:
        """Let those in that wait, and those go that leave.

        Not while somebody is on the way to another generation. Who is new knows nothing yet, so
        nobody goes unless another member stays.
        """
        if self.is_held or not self.is_formed or self._lost_at_s is not None:
            return []
        leaving = tuple(seat for seat in self.members if self._seats[seat].is_leaving)
        staying = len(self.members) - len(leaving)
        if not staying or staying + len(self._waiting) < self.min_workers:
            leaving = ()
        if not self.members or not (leaving or self._waiting):
            return []
        members = (*self.members, *self._waiting)
        return [self._announce(members, is_urgent=False, leaving=leaving)]

    def _lose(self, rest: tuple[int, ...]) -> list[Order]:
        if rest[:1] != self.members[:1]:
            rest = tuple(sorted(rest, key=lambda seat: self.machine_of(seat) != self.here))
        self.members = rest
        if all(self._seats[seat].is_new for seat in rest):  # newcomers know nothing yet
            self.members = ()
            return []
        if len(rest) < self.min_workers:
            self.is_held = True
            return []
        return [self._announce(rest, is_urgent=True)]

    def _announce(
        self, members: tuple[int, ...], *, is_urgent: bool, leaving: tuple[int, ...] = ()
    ) -> Announce:
        """The next generation. Newcomers are let in between two steps, and never in haste.

        In an urgent one members may be anywhere, in an evaluation for example, which a newcomer
        would know nothing of.
        """
        if is_urgent:
            for seat in members:
                if self._seats[seat].is_new:
                    self._seats[seat].state = _State.WAITING
            members = tuple(seat for seat in members if not self._seats[seat].is_new)
        self.generation += 1
        self.members = members
        self._lost_at_s, self._is_urgent = None, is_urgent
        for seat in members:
            if self._seats[seat].state is _State.WAITING:
                self._seats[seat].state = _State.MEMBER
        return Announce(self.generation, members, is_urgent, leaving)

    def _replace(self, seat: int, how: str, *, was_member: bool, now_s: float) -> list[Order]:
        if self.max_replacements is not None and self.replaced >= self.max_replacements:
            return self.give_up(seat, f"all {self.max_replacements} replacements are used up")
        place = self._seats[seat]
        failed = 0 if was_member else place.failed_starts + 1
        if failed >= START_TRIES:
            return self.give_up(seat, f"it {how} {failed} times before it was ready")
        self.replaced += 1
        self._seats[seat] = _Seat(failed_starts=failed)
        return [Start(seat, now_s + (FIRST_BACKOFF_S * 2 ** (failed - 1) if failed else 0.0))]

    def give_up(self, seat: int, reason: str) -> list[Order]:
        """Leave a seat empty."""
        self._seats[seat].state = _State.GONE
        self.size -= 1
        return [GiveUp(seat, reason), *self._stop_if_too_few()]

    def _stop_if_too_few(self) -> list[Order]:
        """Stop where those who are held would wait for replacements that never come."""
        if not self.is_held or self.size >= self.min_workers:
            return []
        return [Stop(f"fewer than {self.min_workers} workers are left")]

    def _count(self, seat: int, step: int, how: str, *, is_kill: bool) -> str:
        """Why this death was one too many, or nothing.

        A crash follows the sample that causes it from worker to worker; who kills picks a worker.
        Several deaths in one generation count as one: they had one cause.
        """
        where = f"step {step}"
        key: tuple[int, ...] = (step, seat) if is_kill else (step,)
        if not is_kill and _NO_MEMORY.search(how):  # which need not be in the same step again
            first = step - step % NEAR_STEPS
            where, key = f"too little memory near step {step}", (first, -1, -1)
        if (self.generation, step) in self._counted:
            return ""
        self._counted.add((self.generation, step))
        self._deaths[key] += 1
        if self._deaths[key] < SAME_STEP:
            return ""
        return f"{where} ended a worker {SAME_STEP} times; the last was {seat}, which {how}: {BUG}"
