"""Several machines: their launchers meet at one store, number themselves, and end together.

The launcher that owns the address given serves the store, for the launchers and for the workers of
all machines. With `--node-rank` the machines bring their numbers; otherwise they are numbered as
they arrive.

    arrive -> everybody is there -> run -> done or failed, told to all -> leave, the host last
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from paceline.env import LOOPBACK, Placement, is_loopback
from paceline.errors import PeerError, UsageError
from paceline.launcher.flags import LaunchOptions
from paceline.launcher.process import Ending, signal_name
from paceline.launcher.run import LocalRun, say
from paceline.launcher.store import StoreClient, StoreServer
from paceline.launcher.supervise import SignalInbox

JOIN_TIMEOUT_S = 600.0
LAST_CALL_S = 30.0
STORE_TIMEOUT_S = 30.0
BEAT_S = 1.0
SILENCE_S = 30.0
LEAVE_S = 5.0
_LOOK_S = 0.05
_NOTICE_S = 4.0
_EVERYWHERE = "0.0.0.0"
_NOT_OURS = {errno.EADDRINUSE, errno.EADDRNOTAVAIL}


class Interrupted(Exception):
    """A signal came while this machine was waiting for others."""


def run_with_others(run: LocalRun) -> int:
    """This machine's part of a run on several; the exit code."""
    rendezvous = Rendezvous(run.options, run.run_id, run.inbox)
    try:
        size = rendezvous.arrive(run.local_size)
        run_attempt = partial(_run_attempt, run, rendezvous)
        return run.run_attempts(run_attempt, size, lambda: rendezvous.is_over)
    except Interrupted as interrupted:
        stopped = Ending(workers=(), signal=interrupted.args[0])
        rendezvous.tell_failure(stopped)
        say(str(stopped))
        return stopped.exit_code
    except OSError as error:
        advice = "See what it printed; it is the one that serves the store."
        raise PeerError(rendezvous.host_is_gone, advice=advice) from error
    finally:
        rendezvous.close()


def _run_attempt(run: LocalRun, rendezvous: Rendezvous, attempt: int) -> Ending:
    ending = run.run(rendezvous.meet(attempt), attempt, look_elsewhere=rendezvous.look)
    if ending.succeeded:
        return replace(ending, elsewhere=rendezvous.wait_for_the_others())
    rendezvous.tell_failure(ending)
    return ending


class Rendezvous:
    """The machines of one run, seen by one of them.

    Invariant: keys are counters or written once, and never deleted, under the run's own prefix;
    what belongs to an attempt has the attempt in its name.
    """

    def __init__(self, options: LaunchOptions, run_id: str, inbox: SignalInbox) -> None:
        self.inbox = inbox
        self.prefix = f"launchers/{run_id}"
        self.host, self.port = options.meeting_point
        self.endpoint = f"{self.host}:{self.port}"
        self.host_is_gone = f"The launcher at {self.endpoint}, where all machines meet, is gone."
        self.least, self.most = options.nnodes
        conf = options.rdzv_conf
        self.number = options.node_rank if options.rdzv_backend == "static" else None
        """This machine's number; None where machines are numbered as they arrive."""
        self.must_host = conf.get("is_host") if self.number is None else self.number == 0
        """Whether this machine serves the store; None if that is for its address to say."""
        self.join_timeout_s = conf.get("join_timeout", conf.get("timeout", JOIN_TIMEOUT_S))
        self.last_call_s = conf.get("last_call_timeout", LAST_CALL_S)
        self.deadline_s = time.monotonic() + self.join_timeout_s
        self.attempt = 0
        self.node = -1
        self.sizes: list[int] = []
        self.is_over = False
        """A machine was told to stop, so nobody restarts."""
        self.beat_at_s = 0.0
        self.heard: tuple[int, float] = (-1, 0.0)
        self.server: StoreServer | None = None
        self.client: StoreClient | None = None

    @property
    def store(self) -> StoreClient:
        assert self.client is not None, "arrive() comes first"
        return self.client

    def arrive(self, local_size: int) -> int:
        """Take a number, and wait until everybody has one; the number of workers on all."""
        self._connect()
        most = self.most
        if self.number is None:
            self.node = self.store.add("arrived", 1) - 1
        else:
            self.node = self.number
            if self.store.add(f"seat/{self.node}", 1) > 1:
                raise UsageError(
                    f"Two machines say that they are number {self.node}.",
                    advice="Give each machine its own --node-rank.",
                )
        self.store.set(f"workers/{self.node}", str(local_size))
        if self.number is None:
            if self.node == 0:
                self._close_registration()
            most = int(self._get("closed", "the first machine to begin"))
            if self.node >= most:
                raise UsageError(
                    f"This run has its {most} machines already.",
                    advice="Raise --nnodes, or give this run another --rdzv-id.",
                )
        self.sizes = [int(self._get(f"workers/{n}", f"machine {n}")) for n in range(most)]
        return sum(self.sizes)

    def meet(self, attempt: int) -> Placement:
        """Wait until every machine is ready for this attempt; the place of our first worker."""
        self.attempt = attempt
        self.deadline_s = time.monotonic() + self.join_timeout_s
        self.heard = (-1, 0.0)
        self.store.set(f"ready/{attempt}/{self.node}", "1")
        for node in range(len(self.sizes)):
            self._get(f"ready/{attempt}/{node}", f"machine {node}")
        if self.server is not None:  # the last attempt's workers have ended everywhere
            self.server.clear(keep=self.prefix)
            self.store.set(f"begin/{attempt}", "1")
        self._get(f"begin/{attempt}", "the machine where all meet")
        return Placement(
            rank=sum(self.sizes[: self.node]),
            size=sum(self.sizes),
            local_size=self.sizes[self.node],
            node=self.node,
            nodes=len(self.sizes),
            master_addr=self.host,
            master_port=self.port,
        )

    def look(self) -> str:
        """Why this machine should end its workers; empty while all is well elsewhere."""
        try:
            if self.store.has(f"failed/{self.attempt}"):
                said = json.loads(self.store.get(f"failed/{self.attempt}"))
                self.is_over = bool(said["is_over"])
                return str(said["text"])
            return self._listen_to_neighbour()
        except OSError:
            self.is_over = True
            return self.host_is_gone

    def tell_failure(self, ending: Ending) -> None:
        """Tell the others why this machine's workers ended, unless they told us."""
        first = ending.first_failure
        self.is_over = self.is_over or ending.signal is not None
        if ending.signal is not None:
            text = f"Machine {self.node} was ended by {signal_name(ending.signal)}."
        elif first is not None:
            text = f"Rank {first.rank} on machine {self.node} failed: {first}."
        else:
            return
        if self.client is None:  # nobody was there yet
            return
        said = json.dumps({"text": text, "is_over": self.is_over})
        try:
            # The first to tell is the one to believe.
            self.store.set_first(f"failed/{self.attempt}", said)
        except OSError:
            self.is_over = True

    def wait_for_the_others(self) -> str:
        """Wait until all machines have finished; why not, if one fails after all."""
        self.store.set(f"done/{self.attempt}/{self.node}", "1")
        for node in range(len(self.sizes)):
            while not self.store.has(f"done/{self.attempt}/{node}"):
                if reason := self.look():
                    return reason
                self._pause(_LOOK_S)
        return ""

    def close(self) -> None:
        """Leave. The host stays a moment, so that the others can still read why."""
        with contextlib.suppress(OSError):
            left = self.store.add("left", 1) if self.client is not None else 0
            deadline_s = time.monotonic() + LEAVE_S
            while self.server and left < len(self.sizes) and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
                left = self.store.add("left", 0)
        for end in (self.client, self.server):
            if end is not None:
                end.close()

    def _connect(self) -> None:
        """Serve the store if this machine is the host, and join it as soon as it is there."""
        self.server = self._listen()
        host = self.host
        if self.server is not None:
            self.server.start()
            host = LOOPBACK if self.server.host == _EVERYWHERE else self.server.host

        def missing() -> str:
            try:
                self.client = StoreClient(
                    host, self.port, self.prefix, STORE_TIMEOUT_S, self.server
                )
            except OSError as error:
                return f"a launcher to listen there ({error.strerror or error})"
            return ""

        self._wait_until(missing, 0.2)

    def _listen(self) -> StoreServer | None:
        """The store if this machine is the host: the one that owns the address."""
        if self.must_host is not None and not self.must_host:
            return None
        try:
            return StoreServer(_bind_address(self.host), self.port)
        except UsageError as error:
            code = getattr(error.__cause__, "errno", None)
            if self.must_host or self.host in {socket.gethostname(), socket.getfqdn()}:
                if code == errno.EADDRNOTAVAIL:  # behind an address that only others see
                    return StoreServer(_EVERYWHERE, self.port)
                raise
            if code not in _NOT_OURS and not isinstance(error.__cause__, socket.gaierror):
                raise
            return None

    def _close_registration(self) -> None:
        """As the first to arrive: begin when all are there, or enough and nobody comes any more."""

        def missing() -> str:
            return "" if self.store.add("arrived", 0) >= self.least else f"{self.least} machines"

        self._wait_until(missing, _LOOK_S)
        count, last_call_s = self.least, time.monotonic() + self.last_call_s
        while count < self.most and time.monotonic() < last_call_s:
            self._pause(_LOOK_S)
            if (now := self.store.add("arrived", 0)) > count:
                count, last_call_s = now, time.monotonic() + self.last_call_s
        self.store.set("closed", str(min(count, self.most)))

    def _listen_to_neighbour(self) -> str:
        """Say that we are alive, and check that the next machine says so too."""
        now_s = time.monotonic()
        if now_s < self.beat_at_s:
            return ""
        self.beat_at_s = now_s + BEAT_S
        self.store.add(f"beat/{self.node}", 1)
        neighbour = (self.node + 1) % len(self.sizes)
        beat = self.store.add(f"beat/{neighbour}", 0)
        if beat != self.heard[0]:
            self.heard = (beat, now_s)
        if now_s - self.heard[1] > SILENCE_S:
            return f"Machine {neighbour} has said nothing for {SILENCE_S:g} s."
        return ""

    def _get(self, key: str, whom: str) -> str:
        """What somebody else writes, as soon as it is there."""

        def missing() -> str:
            if self.store.has(key):
                return ""
            if self.store.has(f"failed/{self.attempt}"):
                raise PeerError(self.look())
            return whom

        self._wait_until(missing, _LOOK_S)
        return self.store.get(key)

    def _wait_until(self, missing: Callable[[], str], every_s: float) -> None:
        """Wait until nothing is missing any more; say now and then what is, and give up at last."""
        notice_at_s = time.monotonic() + _NOTICE_S
        while whom := missing():
            now_s = time.monotonic()
            if now_s > self.deadline_s:
                raise PeerError(
                    f"Waited {self.join_timeout_s:g} s at {self.endpoint} for {whom}.",
                    advice="Start the launcher on every machine with the same --nnodes and "
                    "--rdzv-id, check the address and the firewall, or allow more time with "
                    "--rdzv-conf join_timeout=S.",
                )
            if now_s > notice_at_s:
                say(f"paceline: waiting at {self.endpoint} for {whom}.\n")
                notice_at_s = now_s + 2 * _NOTICE_S
            self._pause(every_s)

    def _pause(self, seconds: float) -> None:
        ready, _, _ = select.select([self.inbox], [], [], seconds)
        numbers = self.inbox.read() if ready else []
        if numbers:
            raise Interrupted(numbers[0])


def _bind_address(host: str) -> str:
    """The address to listen on: the one given, so that no other interface is open.

    A machine's own name often resolves to loopback on that machine, where nobody else could
    reach it; only then is it every interface.
    """
    if is_loopback(host):
        return host
    try:
        return _EVERYWHERE if is_loopback(socket.gethostbyname(host)) else host
    except OSError:
        return host
