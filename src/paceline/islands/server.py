"""The meeting place: it forwards what each island sends in a round to the others, unchanged.

    join    an island reports its step and its settings; all begin with the state of the most
            advanced one. A later one waits for the next round, and gets the state after it; after
            the last round, it gets the state that was kept because an island was missing.
    round   every island sends, and gets what all have sent. After a deadline the round ends without
            those that have not sent; they are behind then, and have to join again. The last one has
            no bytes: who comes to it has what the training has computed.
    state   of an island that was asked for it, for those that wait to join
    be      a connection that each worker keeps open: an island without one has died

Each request is answered on its connection, by a thread of its own: a few per island and round.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.islands.wire import Room, admit, keep_alive, make_room, receive, send

START_S = 600.0
"""How long the first island waits for the others to begin."""
_PROOF_S = 5.0
# A request whose connection broke comes again: its round may be over by then.
_KEPT_ROUNDS = 2

Answer = tuple[Any, ...]
"""A head, and bodies."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The progress of an island that wants to join."""

    step: int
    anchor: str
    """An identifier of the common parameters that it has."""
    ticket: object
    """Identifies the request: of several from one island the newest counts."""


@dataclass(slots=True)
class Round:
    """What the islands have sent after one step."""

    deadline_s: float
    sent: dict[int, tuple[list[float], float, Room]] = field(default_factory=dict)
    """By island: weights, learning rate, packed differences."""
    is_over: bool = False


class RoundServer:
    """The meeting place of `count` islands.

        absent --join--> waiting --(all begin, or it gets a state)--> member --(late)--> out
          ^________________________(its last worker dies)_________________|________________|

    Invariant: a round ends for all islands at once, and all in it get the same bytes.
    """

    def __init__(
        self,
        listener: socket.socket,
        count: int,
        say: Callable[[str], None] = lambda text: None,
        key: bytes | None = None,
    ) -> None:
        """Callers from other machines must prove `key`; a socket in a private folder needs none.

        `listener` is closed with the server.
        """
        self._listener, self._count, self._say, self._key = listener, count, say, key
        self._changed = threading.Condition()
        self._is_closed = False
        self._workers: dict[int, int] = {}
        """By island, how many of its workers are connected."""
        self._members: set[int] = set()
        """The islands that take part in rounds."""
        self._gone: set[int] = set()
        """The members that have died or left since the last round."""
        self._joining: dict[int, Arrival] = {}
        """By island, its request to join, while that waits."""
        self._answers: dict[int, Answer] = {}
        """By island, the answer to its request to join."""
        self._facts: dict[str, Any] = {}
        """The settings of the first island; all must have the same."""
        self._has_begun = self._has_trained = False
        self._finished: set[int] = set()
        """The islands that have the result of the training, or are to end without it."""
        self._last: Answer | None = None
        """The state after the last round, if an island was missing in it."""
        self._begin_by_s: float | None = None
        self._rounds: dict[int, Round] = {}
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def is_unused(self) -> bool:
        """Whether there are several islands, and none has ever asked to join the others."""
        return self._count > 1 and not self._facts

    def wait_until_left(self, timeout_s: float) -> bool:
        """After the last round, wait until every island has the result and has left."""

        def is_done() -> bool:
            return len(self._finished) == self._count and not any(self._workers.values())

        with self._changed:
            missing = [n for n in range(self._count) if self._finished and n not in self._finished]
            if missing:
                names = ", ".join(f"island {number}" for number in missing)
                self._say(f"waiting up to {timeout_s:g} s for {names} to get the result.")
            return not self._finished or self._changed.wait_for(is_done, timeout_s)

    def close(self) -> None:
        """End all connections, and wait for their threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for connection in [self._listener, *self._connections]:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=args, name="paceline-islands", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._is_closed:  # such as too many open files
                    time.sleep(0.1)
                continue
            with self._changed:
                self._connections.add(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._key is not None:
                keep_alive(connection)
                connection.settimeout(_PROOF_S)
                if not admit(connection, self._key):
                    return
                connection.settimeout(None)
            self._answer(connection, *receive(connection, make_room))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the caller has died, or does not speak this protocol
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, head: dict[str, Any], body: Room) -> None:
        island = int(head["island"])
        match head["ask"]:
            case "be":
                self._track_presence(connection, island)
            case "join":
                send(connection, *self._join(island, head))
            case "round":
                send(connection, *self._exchange_round(island, head, body))
            case "state":
                self._pass_state_on(island, head, body)
                send(connection, {})

    def _track_presence(self, connection: socket.socket, island: int) -> None:
        with self._changed:
            self._workers[island] = self._workers.get(island, 0) + 1
        try:
            send(connection, {})
            while connection.recv(1):
                pass
        finally:
            with self._changed:
                self._workers[island] -= 1
                if not self._workers[island]:
                    self._remove_island(island)

    def _remove_island(self, island: int) -> None:
        """The last worker of an island has died or left."""
        if island in self._members:
            self._gone.add(island)
        self._members.discard(island)
        self._joining.pop(island, None)
        self._answers.pop(island, None)
        self._after_loss()

    def _count_rest(self, island: int) -> str:
        left = len(self._members - {island})
        return "1 other continues" if left == 1 else f"{left} others continue"

    def _after_loss(self) -> None:
        if not self._members:  # islands that wait to join begin together, as at the start
            self._has_begun, self._begin_by_s = False, None
            self._gone.clear()
        for round_ in self._rounds.values():
            self._end_if_complete(round_)
        if not self._members:  # their steps may come again, from an older checkpoint
            self._rounds.clear()
        self._changed.notify_all()

    def _join(self, island: int, head: dict[str, Any]) -> Answer:
        """Wait until this island can begin; returns the answer, with a state if it is behind."""
        facts: dict[str, Any] = head["facts"]
        arrival = Arrival(int(head["step"]), str(head["anchor"]), object())
        with self._changed:
            if not self._workers.get(island):  # it has died since it sent the request
                return ({"gone": True},)
            self._facts = self._facts or facts
            for key in (key for key in self._facts if self._facts[key] != facts.get(key)):
                return ({"differs": [key, self._facts[key], facts.get(key)]},)
            self._members.discard(island)
            self._answers.pop(island, None)
            self._joining[island] = arrival
            self._after_loss()
            while not self._is_closed:
                if self._joining.get(island) is not arrival:
                    # Answered; or the island has died, or has sent a newer request.
                    return self._answers.pop(island, ({"gone": True},))
                if self._finished and (self._last is not None or not self._members):
                    del self._joining[island]
                    self._finished.add(island)
                    return self._last or ({"over": True},)
                left_s = self._try_to_begin(float(head["timeout_s"]))
                if self._joining.get(island) is arrival:
                    self._changed.wait(left_s)
        return ({"gone": True},)

    def _try_to_begin(self, timeout_s: float) -> float | None:
        """Begin if all are there, or after the deadline; returns how long to wait otherwise."""
        if self._has_begun:
            return None
        now_s = time.monotonic()
        if self._begin_by_s is None:
            self._begin_by_s = now_s + (timeout_s if self._has_trained else START_S)
        if len(self._joining) < self._count and now_s < self._begin_by_s:
            return self._begin_by_s - now_s
        best = max(each.step for each in self._joining.values())
        first = min(island for island, each in self._joining.items() if each.step == best)
        same = (best, self._joining[first].anchor)
        ready = [n for n, each in self._joining.items() if (each.step, each.anchor) == same]
        self._has_begun = True
        for island in ready:
            del self._joining[island]
        for island in ready:
            gives = island == first and bool(self._joining)
            self._answers[island] = ({"step": best, "gives": gives},)
        self._members.update(ready)
        missing = self._count - len(ready) - len(self._joining)
        if missing:
            self._say(f"{missing} of {self._count} islands did not come; the others begin.")
        self._changed.notify_all()
        return None

    def _exchange_round(self, island: int, head: dict[str, Any], body: Room) -> Answer:
        """Add what an island sends; returns what all have sent, once the round is over."""
        step, timeout_s = int(head["step"]), float(head["timeout_s"])
        with self._changed:
            if island not in self._members:
                return ({"is_late": True},)
            self._has_trained = True
            found = self._rounds.get(step)
            if found is None:
                found = self._rounds[step] = Round(time.monotonic() + timeout_s)
            if not found.is_over:
                weights = [float(weight) for weight in head["weights"]]
                found.sent[island] = weights, float(head["rate"]), body
                self._end_if_complete(found)
            while not found.is_over and not self._is_closed:
                left_s = found.deadline_s - time.monotonic()
                if left_s <= 0:
                    self._end_round_without(found, timeout_s)
                else:
                    self._changed.wait(left_s)
            if island not in found.sent or not found.is_over:
                return ({"is_late": True},)
            self._finished |= found.sent.keys() if head["is_last"] else set()
            for old in sorted(self._rounds)[:-_KEPT_ROUNDS]:
                del self._rounds[old]
            islands = sorted(found.sent)
            is_wanted = bool(self._joining) or (head["is_last"] and len(islands) < self._count)
            gives = is_wanted and island == min(self._members & set(islands), default=-1)
            # The caller's own bytes are not sent back, unless an earlier request of its island sent
            # different ones, which are those that count.
            has_own = found.sent[island][2] is not body
            answer = {
                "islands": islands,
                "weights": [found.sent[each][0] for each in islands],
                "rates": [found.sent[each][1] for each in islands],
                "gives": gives,
                "has_own": has_own,
            }
            return (answer, *(found.sent[n][2] for n in islands if n != island or has_own))

    def _end_if_complete(self, round_: Round) -> None:
        if not round_.is_over and round_.sent and self._members <= round_.sent.keys():
            round_.is_over = True
            # Not before: where a run ends, one island is the first to leave.
            for island in sorted(self._gone):
                self._say(f"island {island} is gone; {self._count_rest(island)}.")
            self._gone.clear()
            self._changed.notify_all()

    def _end_round_without(self, round_: Round, timeout_s: float) -> None:
        for island in sorted(self._members - round_.sent.keys()):
            self._say(
                f"island {island} did not come to a round within {timeout_s:g} s; "
                f"{self._count_rest(island)}."
            )
            self._members.discard(island)
        self._end_if_complete(round_)

    def _pass_state_on(self, island: int, head: dict[str, Any], body: Room) -> None:
        """Give the state of an island to those that wait for one."""
        with self._changed:
            if self._finished:
                self._last = {**head, "from": island}, body
                self._finished |= self._joining.keys()
            for other in list(self._joining) if island in self._members else ():
                del self._joining[other]
                self._answers[other] = ({**head, "from": island}, body)
                self._members.add(other)
                if self._has_trained:
                    self._say(f"island {other} takes part again, after step {head['step']}.")
            self._changed.notify_all()
