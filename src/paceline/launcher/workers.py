"""The workers of this machine as their launcher talks to them; decisions may be made elsewhere.

Each has a channel to its launcher, and a ledger that outlives it. Launchers of several machines
have channels to each other: one leads and decides (`generations`), the others obey (`follower`).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.group import LAST_GENERATION, Ledger, receive, send
from paceline.launcher.channel import Channel, ChannelBroken
from paceline.launcher.deaths import StopReason, WorkerExit

RESIZING = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals to a launcher that add a worker and take one away; no launcher is ended by them."""


@dataclass
class WorkerChannel:
    """The launcher's end of what it shares with one worker."""

    socket: socket.socket
    ledger: Ledger
    theirs: tuple[int, int]
    """Descriptors for the worker: its end of the channel, and its ledger."""
    unsent: deque[dict[str, Any]] = field(default_factory=deque)

    @classmethod
    def open(cls) -> WorkerChannel:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)  # a worker that is stopped must not stop the launcher
        descriptor = Ledger.create()
        try:
            ledger = Ledger(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        return cls(ours, ledger, (theirs.detach(), descriptor))

    def tell(self, message: dict[str, Any] | None = None) -> None:
        """Send a message as soon as there is room for it: a worker that is stopped, or its busy
        machine, reads what it was told later, and nothing of it may be missing then."""
        self.unsent += [] if message is None else [message]
        try:
            while self.unsent:
                send(self.socket, self.unsent[0])
                self.unsent.popleft()
        except BlockingIOError:
            pass  # the next turn tries again
        except OSError:
            self.unsent.clear()  # its end will be heard of next

    def close(self) -> None:
        self.socket.close()
        self.ledger.close()


@dataclass(kw_only=True)
class Workers:
    """The workers of this machine; who starts and ends them may be decided elsewhere."""

    say: Callable[[str], None]
    survives_errors: bool = False
    """Whether they are replaced when their script raises an exception."""
    survives: bool = True
    """Whether workers have a channel to this launcher: without it the first death ends all."""
    channels: dict[int, Channel] = field(default_factory=dict)
    """Channels to launchers of other machines, by machine."""
    silence_s: float = 0.0
    """After how long without a word a machine counts as gone."""
    reached: dict[str, set[int]] = field(default_factory=lambda: {"done": set(), "ready": set()})
    """Machines that have finished this attempt, and those that are ready for the next."""
    worker_channels: dict[int, WorkerChannel] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the run, as its first workers told them."""
    wanted: list[int] = field(default_factory=list)
    """Workers of this machine that are to be started now."""
    dismissed: set[int] = field(default_factory=set)
    """Replacements that came too late, and are to be ended."""
    end: StopReason | None = None
    is_on: bool = False
    """Whether a run of ours trains: other scripts end with their first worker."""
    broken: list[Channel] = field(default_factory=list)
    """Channels that are over, but still open."""
    can_repeat: bool = False
    """Whether a new process would find the training complete: the last step is saved."""
    why_not_repeated: str = "no checkpoint has the last step"
    rests: set[int] = field(default_factory=set)
    """Workers that were gone before the training was over: another process does the rest of the
    script of each, alone."""
    _waiting: dict[int, bool] = field(default_factory=dict)
    _told: dict[int, bool] = field(default_factory=dict)
    """Whether workers wait too long, as other machines have told, and were told."""
    _places: dict[int, list[str]] = field(default_factory=dict)
    """Where workers of other machines wait, if all of a machine do."""
    _finished: set[int] = field(default_factory=set)
    _leavers: list[int] = field(default_factory=list)
    """Workers whose script has left its loop, while others have not; until that is said."""
    _left_early: set[int] = field(default_factory=set)
    """Those of whom that is said."""

    def has_finished(self, worker: int) -> bool:
        """Whether a worker has left the loop, and is in the rest of its script."""
        return worker in self._finished

    def trains(self, worker: int) -> bool:
        """Whether it is in the loop of a run that survives, and is told why it is ended."""
        is_told = self.is_on and worker in self.worker_channels
        return is_told and self.is_member(worker) and not self.has_finished(worker)

    def has_left_loop(self, worker: int) -> bool:
        """Whether it has done so before the last step."""
        return worker in self._leavers or worker in self._left_early

    def _was_thrown_out(self, end: WorkerExit) -> bool:
        """Whether a worker that seemed to have left its loop has failed in it."""
        if not end.is_scripts or end.rank not in self._leavers:
            return False
        self._leavers.remove(end.rank)
        self._finished.discard(end.rank)
        return True

    def resize(self, number: int) -> None:
        """A person wants one worker more, or one less."""
        self.say(
            f"{signal.Signals(number).name} changes nothing here: workers are added and taken away "
            "on one machine, without --no-survive."
        )

    def on_stop(self) -> None:
        """A signal asks all workers to stop, and a death may come in between."""

    def explains_loss(self, worker: int) -> bool:
        """Whether a worker that says another one is gone can be right, as far as is known here."""
        return True

    def does_rest(self, worker: int) -> bool:
        """Whether scripts leave to this worker what is done once for all, after the loop."""
        return worker == 0

    def on_message(self, worker: int) -> bool:
        """A worker says something; False if it has closed its end, as `exec` does."""
        while message := receive(self.worker_channels[worker].socket):
            self._hear(worker, message)
        return message is None

    def hear_all(self) -> None:
        """Catch up with what workers have said: a signal or a death may overtake it."""
        for worker in list(self.worker_channels):
            self.on_message(worker)

    def open_worker_channel(self, worker: int) -> WorkerChannel:
        """The channel to a worker that is about to be started."""
        channel = self.worker_channels[worker] = WorkerChannel.open()
        self._finished.discard(worker)
        self._left_early.discard(worker)
        if self.is_on:
            # The first message on it, which a replacement receives before anything else.
            send(channel.socket, self.facts)
        return channel

    def close_worker_channel(self, worker: int) -> dict[str, Any]:
        """Hear the last words of a worker that has ended; its ledger."""
        self.hear_all()  # how its death is judged depends on what the others have said before it
        channel = self.worker_channels.pop(worker)
        ledger = channel.ledger.read()
        channel.close()
        return ledger

    def drop_worker_channel(self, worker: int) -> None:
        """Forget the channel to a worker that could not be started."""
        if worker in self.worker_channels:
            self.worker_channels.pop(worker).close()

    def obey(self, order: dict[str, Any]) -> None:
        """Do what was decided about a worker of this machine."""
        match order:
            case {"do": "tell", "worker": int(worker), "generation": generation}:
                if worker in self.worker_channels:
                    self.worker_channels[worker].tell(generation)
            case {"do": "start", "worker": int(worker)}:
                self.wanted.append(worker)
            case {"do": "dismiss", "worker": int(worker)}:
                self.dismissed.add(worker)

    def tell_end(self, reason: str) -> None:
        """Tell the workers of this machine that no generation follows, so that none waits."""
        end = {"number": LAST_GENERATION, "rank": 0, "size": 1, "ends": reason}
        for channel in self.worker_channels.values():
            channel.tell(end)

    def take_starts(self) -> list[int]:
        """Workers that are to be started now."""
        taken, self.wanted = self.wanted, []
        return taken

    def on_channel(self, machine: int) -> None:
        """Another machine's launcher says something."""
        try:
            for message in self.channels[machine].receive():
                match message:
                    case {"machine": "done" | "ready" as said}:
                        self.reached[said].add(machine)
                    case {"machine": "waits", "is_waiting": bool(is_waiting)}:
                        self._waiting[machine] = is_waiting
                    case {"machine": "stuck", "places": list(places)}:
                        self._places[machine] = places
                    case _:
                        self._hear_machine(message)
        except ChannelBroken as error:
            self._miss(machine, str(error))

    def is_awaited(self, waits: bool) -> bool:
        """Whether a worker of any machine has waited too long; `waits` if one of this machine."""
        for machine, channel in self.channels.items():
            others = (each for other, each in self._waiting.items() if other != machine)
            told = waits or any(others)
            if self._told.get(machine, False) != told:
                self._told[machine] = told
                channel.send({"machine": "waits", "is_waiting": told})
        return waits or any(self._waiting.get(machine) for machine in self.channels)

    def gather_places(self, places: list[str]) -> list[str]:
        """Where the workers of all machines wait, given those of this one; nothing unless all do,
        and this machine decides."""
        others = [self._places.get(machine, []) for machine in self.channels]
        return sum(others, places) if places and all(others) else []

    def keep_in_touch(self) -> None:
        """Tell workers what they had no room for; let other launchers know that this one lives,
        and notice which of them is silent."""
        for worker_channel in self.worker_channels.values():
            worker_channel.tell()
        for machine, channel in list(self.channels.items()):
            # First what has come: it may have been this launcher that was stopped for a while.
            self.on_channel(machine)
            if machine not in self.channels:
                continue
            now_s = time.monotonic()
            channel.beat(now_s)
            if now_s - channel.heard_s > self.silence_s:
                self._miss(machine, f"it has said nothing for {self.silence_s:g} s")

    def pass_on(self, end: StopReason) -> None:
        """Tell the launchers of other machines to end."""
        for channel in self.channels.values():
            channel.send({"do": "end", **asdict(end)})

    def _miss(self, machine: int, why: str) -> None:
        self.broken.append(self.channels.pop(machine))
        self._lose_machine(machine, why)

    def is_member(self, worker: int) -> bool:
        """Whether a worker takes part in the training now."""
        raise NotImplementedError

    def _hear(self, worker: int, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _hear_machine(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _lose_machine(self, machine: int, why: str) -> None:
        raise NotImplementedError
