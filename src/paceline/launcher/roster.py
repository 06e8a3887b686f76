"""Who trains in which generation: the launcher's side of survival, without any process.

Events go in, orders come out, and time is an argument, so that a test can play any sequence of
deaths. `launcher.supervise` feeds it and carries the orders out.

    starting --ready--> waiting --announced--> member --died--> gone, its number is given to another
                                                 └--finished, or left as asked--> left --> gone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from paceline.launcher.deaths import Deaths, WorkerExit

START_TRIES = 5
"""So often a replacement may die before it is ready."""
FIRST_BACKOFF_S = 1.0
LOST_GRACE_S = 0.05
"""How long a broken group waits for the news of a death that would explain it."""
MOST_FRUITLESS, FORMING_S = 10, 30.0
"""So many groups in a row may fail to form, and any number within the time."""
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
    """Start this worker, at that time."""

    worker: int
    at_s: float


@dataclass(frozen=True, slots=True)
class RestartAll:
    """No worker is left that knows the state: begin with the newest checkpoint."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End all workers."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No further replacement for this worker; the others continue."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End a replacement for which nothing is left to do."""

    worker: int


Order = Announce | Start | RestartAll | Stop | GiveUp | Dismiss


class _State(Enum):
    STARTING = auto()
    WAITING = auto()
    MEMBER = auto()
    LEFT = auto()
    GONE = auto()


@dataclass(slots=True)
class _WorkerState:
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
    """The workers of one run by their number, which a replacement takes over.

    Invariant: members of a generation are listed oldest first, so that rank 0 and its duties move
    only when the worker that had them is gone; then to one on the same machine as the roster, if
    there is one.
    """

    size: int
    """How many workers are wanted."""
    min_workers: int = 1
    max_replacements: int | None = None
    machine_by_worker: Mapping[int, int] = field(default_factory=dict)
    """Where workers are, if not on machine `here`."""
    here: int = 0
    generation: int = 0
    members: tuple[int, ...] = ()
    """Of the current generation, in rank order."""
    is_held: bool = False
    """Too few are left: they wait for replacements."""
    replaced: int = 0
    is_finished: bool = False
    """A member has done all there was to do, and none finishes before all have: no more joins."""
    is_stopping: bool = False
    """All were asked to stop: those left finish the step and save, and none is replaced."""
    patience_s: float = FORMING_S
    """How long at least groups may fail to form: what is between machines may come back."""
    fruitless: int = 0
    """How many groups in a row the same members could not form."""
    _fruitless_since_s: float = 0.0
    _why_by_worker: dict[int, str] = field(default_factory=dict)
    """What the members said of the last ones."""
    _workers: dict[int, _WorkerState] = field(default_factory=dict)
    _lost_at_s: float | None = None
    _is_urgent: bool = True
    """Whether members were told to leave the generation before this one at once."""
    deaths: Deaths = field(default_factory=Deaths)

    def __post_init__(self) -> None:
        self.members = tuple(range(self.size))
        self._workers = {
            worker: _WorkerState(_State.MEMBER, is_new=False) for worker in self.members
        }

    @property
    def is_formed(self) -> bool:
        """Whether every member has joined the current generation."""
        return all(self._workers[worker].joined == self.generation for worker in self.members)

    @property
    def kept_waiting(self) -> tuple[int, ...]:
        """Who waits for others: members for replacements, and newcomers for the end of a step."""
        return (*(self.members if self.is_held else ()), *self._waiting)

    @property
    def has_trained(self) -> bool:
        """Whether a worker ever joined a generation: until then there is nothing to survive."""
        return self.generation > 0 or self.is_formed

    def on_joined(self, worker: int, generation: int) -> list[Order]:
        """A member has the group, and the state, of a generation."""
        place = self._workers[worker]
        place.joined, place.failed_starts = generation, 0
        # The word may come too late: a newer generation is announced already, perhaps without it.
        if worker in self.members and generation == self.generation:
            place.is_new = False
        return self._invite()

    def is_new(self, worker: int) -> bool:
        """Whether a worker is yet to take part: an urgent generation does not wait for it."""
        return self._workers[worker].is_new

    def on_ready(self, worker: int) -> list[Order]:
        """A replacement has built everything and waits to be let in."""
        if self.is_finished:
            return self._dismiss()
        self._workers[worker].state = _State.WAITING
        if self.is_held and len(self.members) + len(self._waiting) >= self.min_workers:
            self.is_held = False
            return [self._announce((*self.members, *self._waiting), is_urgent=True)]
        return [*self._dismiss_waiting(), *self._invite()]

    def on_died(self, end: WorkerExit, now_s: float) -> list[Order]:
        """A worker ended that should not have."""
        worker, place = end.rank, self._workers[end.rank]
        was_member = worker in self.members
        if was_member and self.deaths.ends_run(end):
            return [Stop(end.reason)]
        state, place.state = place.state, _State.GONE
        if state in (_State.LEFT, _State.GONE):
            return []
        if was_member and not self.has_trained:
            return [RestartAll(f"worker {worker} {end.how} before training began")]
        orders: list[Order] = []
        if was_member:
            if reason := self.deaths.judge(end, self.generation):
                return [Stop(reason)]
            orders += self._lose(tuple(each for each in self.members if each != worker))
            if not self.members and self.is_finished:
                return []
            if not self.members:
                return [RestartAll(f"worker {worker}, the last one, {end.how}{end.where}")]
        if not (place.is_leaving or self.is_finished or self.is_stopping):
            how = end.how_in_full
            orders += self._replace(worker, how, was_member=was_member, now_s=now_s)
        return orders

    def on_machine_gone(self, machine: int) -> list[Order]:
        """A machine is gone or cannot be reached: all its workers at once, and none is replaced."""
        for worker, place in self._workers.items():
            if self.machine_of(worker) == machine:
                is_wanted = place.state not in (_State.LEFT, _State.GONE) and not place.is_leaving
                self.size -= is_wanted
                place.state = _State.GONE
        rest = tuple(worker for worker in self.members if self.machine_of(worker) != machine)
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

    def on_lost(self, worker: int, generation: int, now_s: float, why: str = "") -> list[Order]:
        """A member's group is broken; which worker died, if one did, will be known soon.

        Where the next generation waits for the end of a step, others may wait in this one for what
        will not come.
        """
        is_awaited = generation == self.generation - 1 and not self._is_urgent
        if (generation == self.generation or is_awaited) and worker in self.members:
            self._lost_at_s = min(now_s, self._lost_at_s or now_s)
            self._why_by_worker[worker] = why
        return []

    def on_stop(self) -> list[Order]:
        """All are asked to stop, which those who wait for replacements can do without them."""
        self.is_stopping, was_held = True, self.is_held
        self.is_held = False
        held = [self._announce(self.members, is_urgent=True)] if was_held else []
        return [*held, *self._dismiss_waiting()]

    def _dismiss_waiting(self) -> list[Order]:
        """No worker is let in any more where all are to stop."""
        late = [
            worker
            for worker, each in self._workers.items()
            if self.is_stopping and each.state in (_State.STARTING, _State.WAITING)
        ]
        for worker in late:
            self._workers[worker].state = _State.GONE
        return [Dismiss(worker) for worker in late]

    @property
    def due_s(self) -> float | None:
        """When to call `on_time`; never while all wait for a replacement."""
        if self._lost_at_s is None or self.is_held:
            return None
        return self._lost_at_s + LOST_GRACE_S

    def on_time(self, now_s: float) -> list[Order]:
        """No worker died: the same members form another group."""
        if self.due_s is None or now_s < self.due_s:
            return []
        if self.is_formed or not self.fruitless:
            self._fruitless_since_s = now_s
        self.fruitless = 0 if self.is_formed else self.fruitless + 1
        is_late = now_s - self._fruitless_since_s >= self.patience_s
        if self.fruitless >= MOST_FRUITLESS and is_late:
            self._lost_at_s = None
            said = (f"worker {one}: {why}" for one, why in sorted(self._why_by_worker.items()))
            text = f"{self.fruitless} groups in a row could not be formed"
            return [Stop("; ".join((text, *said)))]
        return [self._announce(self.members, is_urgent=True), *self._dismiss_waiting()]

    @property
    def is_left(self) -> bool:
        """Whether every member was asked to go: that is for the run."""
        return bool(self.members) and all(self._workers[each].is_leaving for each in self.members)

    def on_leaving(self, worker: int, now_s: float) -> list[Order]:
        """A worker is asked to go, which it does between two steps, once enough others train."""
        place = self._workers[worker]
        if not place.is_leaving:
            place.is_leaving = True
            self.size -= 1
        if self.is_left:
            return []
        # Others for workers that leave, where too few would be left.
        more = self.grow(now_s) if self.size < self.min_workers else []
        return more + self._invite()

    def on_left(self, worker: int) -> list[Order]:
        """A member has gone, as it was asked to; its process ends soon."""
        self._workers[worker].state = _State.LEFT
        if worker not in self.members:
            return []
        return self._lose(tuple(each for each in self.members if each != worker))

    def has_left(self, worker: int) -> bool:
        """Whether a worker that takes part no more has still to end."""
        return self._workers[worker].state is _State.LEFT

    def on_gone(self, worker: int) -> None:
        """It has ended: another worker may have the number."""
        self._workers[worker].state = _State.GONE

    def on_finished(self, worker: int, *, is_left: bool = False, now_s: float = 0.0) -> list[Order]:
        """A member has done all there was to do; it takes part in nothing any more.

        Where its script has left the loop, the others have a moment to do so too.
        """
        self._workers[worker].state = _State.LEFT
        self.members = tuple(each for each in self.members if each != worker)
        # Newcomers that are invited, and not in yet, know nothing to continue with.
        if is_left and any(not self._workers[each].is_new for each in self.members):
            self._lost_at_s = self._lost_at_s or now_s + LEFT_GRACE_S
            return []
        self.is_finished, orders = True, self._dismiss()
        # Who has lost its group, or is on its way to a new one, cannot meet the finished there.
        is_forming = self.generation > 0 and self._is_urgent and not self.is_formed
        is_awaited = bool(self.members) and (self._lost_at_s is not None or is_forming)
        self._lost_at_s = (self._lost_at_s or now_s) if is_awaited else None
        return orders

    def take_back(self, worker: int) -> None:
        """It had not left the loop as it seemed: an exception had."""
        self._workers[worker].state = _State.MEMBER
        self.members = (*self.members, worker)
        self.is_finished = False

    def grow(self, now_s: float) -> list[Order]:
        """One more worker, with the first number of this machine that is free."""
        if self.is_finished or self.is_stopping:
            return []
        taken = {worker for worker, each in self._workers.items() if each.state is not _State.GONE}
        here = (number for number in count() if self.machine_of(number) == self.here)
        worker = next(number for number in here if number not in taken)
        self._workers[worker] = _WorkerState()
        self.size += 1
        return [Start(worker, now_s)]

    def shrink(self, now_s: float) -> list[Order]:
        """One worker less: the youngest goes."""
        staying = [worker for worker in self.members if not self._workers[worker].is_leaving]
        return self.on_leaving(staying[-1], now_s) if staying else []

    def machine_of(self, worker: int) -> int:
        return self.machine_by_worker.get(worker, self.here)

    def _dismiss(self) -> list[Order]:
        """Replacements that have never joined are not waited for.

        Who was there from the beginning takes part before it is heard of, and has to finish too.
        """
        late = [
            worker
            for worker, each in self._workers.items()
            if each.is_new and each.joined < 0 and each.state is not _State.GONE
        ]
        for worker in late:
            self._workers[worker].state = _State.GONE
        self.members = tuple(each for each in self.members if each not in late)
        return [Dismiss(worker) for worker in late]

    @property
    def _waiting(self) -> tuple[int, ...]:
        return tuple(s for s, each in self._workers.items() if each.state is _State.WAITING)

    def _invite(self) -> list[Order]:
        """Let those in that wait, and those go that leave.

        Not while a worker is on the way to another generation. Who is new knows nothing yet, so
        no member goes unless another stays.
        """
        if self.is_held or self.is_stopping or not self.is_formed or self._lost_at_s is not None:
            return []
        leaving = tuple(worker for worker in self.members if self._workers[worker].is_leaving)
        staying = len(self.members) - len(leaving)
        if not staying or staying + len(self._waiting) < self.min_workers:
            leaving = ()
        if not self.members or not (leaving or self._waiting):
            return []
        members = (*self.members, *self._waiting)
        return [self._announce(members, is_urgent=False, leaving=leaving)]

    def _lose(self, rest: tuple[int, ...]) -> list[Order]:
        self.fruitless, self._why_by_worker = 0, {}
        if rest[:1] != self.members[:1]:
            # Rank 0 is gone. The sort is stable, so the others stay oldest first.
            rest = tuple(sorted(rest, key=lambda worker: self.machine_of(worker) != self.here))
        self.members = rest
        if all(self._workers[worker].is_new for worker in rest):  # newcomers know nothing yet
            self.members = ()
            return []
        if len(rest) < self.min_workers and not self.is_stopping:
            self.is_held = True
            return []
        return [self._announce(rest, is_urgent=True), *self._dismiss_waiting()]

    def _announce(
        self, members: tuple[int, ...], *, is_urgent: bool, leaving: tuple[int, ...] = ()
    ) -> Announce:
        """The next generation. Newcomers are let in between two steps, and never in haste.

        In an urgent one members may be anywhere, in an evaluation for example, which a newcomer
        would know nothing of.
        """
        if is_urgent:
            for worker in members:
                if self._workers[worker].is_new:
                    self._workers[worker].state = _State.WAITING
            members = tuple(worker for worker in members if not self._workers[worker].is_new)
        self.generation += 1
        self.members = members
        self._lost_at_s, self._is_urgent = None, is_urgent
        for worker in members:
            if self._workers[worker].state is _State.WAITING:
                self._workers[worker].state = _State.MEMBER
        return Announce(self.generation, members, is_urgent, leaving)

    def _replace(self, worker: int, how: str, *, was_member: bool, now_s: float) -> list[Order]:
        if self.max_replacements is not None and self.replaced >= self.max_replacements:
            return self.give_up(worker, f"all {self.max_replacements} replacements are used up")
        place = self._workers[worker]
        failed = 0 if was_member else place.failed_starts + 1
        if failed >= START_TRIES:
            return self.give_up(worker, f"{failed} tries failed, and at the last it {how}")
        self.replaced += 1
        self._workers[worker] = _WorkerState(failed_starts=failed)
        return [Start(worker, now_s + (FIRST_BACKOFF_S * 2 ** (failed - 1) if failed else 0.0))]

    def give_up(self, worker: int, reason: str) -> list[Order]:
        """Leave a worker without a replacement."""
        self._workers[worker].state = _State.GONE
        self.size -= 1
        return [GiveUp(worker, reason), *self._stop_if_too_few()]

    def _stop_if_too_few(self) -> list[Order]:
        """Stop where those who are held would wait for replacements that never come."""
        if not self.is_held or self.size >= self.min_workers:
            return []
        return [Stop(f"fewer than {self.min_workers} workers are left")]
