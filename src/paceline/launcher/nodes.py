"""Several machines: their launchers meet at one store, number themselves, and end together.

The launcher that owns the address given serves the store, for the launchers and for the workers of
all machines, and decides who trains if workers die. With `--node-rank` the machines bring their
numbers; otherwise they are numbered as they arrive.

    arrive -> everybody is there -> run -> done or failed, told to all -> leave, the host last
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from paceline import env
from paceline.env import LOOPBACK, Placement, is_loopback
from paceline.errors import PeerError, UsageError
from paceline.launcher.flags import LaunchOptions
from paceline.launcher.follower import Follower
from paceline.launcher.generations import End, Generations
from paceline.launcher.process import Ending, signal_name
from paceline.launcher.run import LocalRun, say, tell
from paceline.launcher.store import StoreClient, StoreServer
from paceline.launcher.supervise import SignalInbox
from paceline.launcher.wire import LineBroken, Wire, make_key

JOIN_TIMEOUT_S = 600.0
LAST_CALL_S = 30.0
STORE_TIMEOUT_S = 30.0
BEAT_S = 1.0
SILENCE_S = 30.0
LEAD = -1
"""Under which other machines keep their line to the lead."""
LEAD_NAME = "the machine where all meet"
LEAVE_S = 5.0
_LOOK_S = 0.05
_NOTICE_S = 4.0
_EVERYWHERE = "0.0.0.0"
_NOT_OURS = {errno.EADDRINUSE, errno.EADDRNOTAVAIL}


class Interrupted(Exception):
    """A signal came while this machine was waiting for others."""


def run_with_others(run: LocalRun) -> int:
    """This machine's part of a run on several; the exit code."""
    rendezvous = Rendezvous(run.options, run.run_id, run.inbox, survives=run.survives)
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
    first = rendezvous.meet(attempt)
    rendezvous.workers = workers = _make_workers(run, rendezvous)
    look = rendezvous.look if workers is None else None
    ending = run.run(first, attempt, look_elsewhere=look, generations=workers)
    if ending.succeeded:
        return replace(ending, elsewhere=rendezvous.wait_for_the_others())
    rendezvous.tell_failure(ending)
    return ending


def _make_workers(run: LocalRun, rendezvous: Rendezvous) -> Generations | Follower | None:
    """What keeps the workers of this machine alive, if they are to be."""
    if not rendezvous.survives:
        return None
    if rendezvous.server is None:
        return Follower(
            say=tell,
            wires=rendezvous.wires,
            lead=LEAD,
            lead_is_gone=rendezvous.host_is_gone,
        )
    machines = [node for node, size in enumerate(rendezvous.sizes) for _ in range(size)]
    roster = run.make_roster(len(machines), dict(enumerate(machines)))
    roster.here = rendezvous.node
    return Generations(
        say=tell,
        wires=rendezvous.wires,
        roster=roster,
        on_machine_gone=rendezvous.on_machine_gone,
        give_up_keys=rendezvous.server.give_up,
    )


class Rendezvous:
    """The machines of one run, seen by one of them.

    Invariant: keys are counters or written once, and never deleted, under the run's own prefix;
    what belongs to an attempt has the attempt in its name.
    """

    def __init__(
        self, options: LaunchOptions, run_id: str, inbox: SignalInbox, *, survives: bool = False
    ) -> None:
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
        self.survives = survives
        """Whether trainings survive the death of workers: as the lead wants it."""
        self.wires: dict[int, Wire] = {}
        """Lines to the other machines, or to the lead."""
        self.workers: Generations | Follower | None = None
        self.gone: set[int] = set()
        self.is_near_store = False
        """Whether workers of this machine reach the store without the network."""
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
        self.sizes = [int(self.store.get(f"workers/{node}")) for node in range(len(self.sizes))]
        self.store.set(f"ready/{attempt}/{self.node}", "1")
        for node in self._nodes_left:
            self._get(f"ready/{attempt}/{node}", f"machine {node}")
        self._open_wires()
        if self.server is not None:  # the last attempt's workers have ended everywhere
            self.server.clear(keep=self.prefix)
            self.store.set(f"begin/{attempt}", "1")
        self._get(f"begin/{attempt}", LEAD_NAME)
        return Placement(
            rank=sum(self.sizes[: self.node]),
            size=sum(self.sizes),
            local_size=self.sizes[self.node],
            node=self.node,
            nodes=len(self.sizes),
            master_addr=self.host,
            master_port=self.port,
            store_addr=LOOPBACK if self.is_near_store else "",
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
        if self.workers is not None and self.workers.end is not None:
            self.is_over = self.is_over or self.workers.end.is_final
            return  # all were told, or are gone
        if ending.signal is not None:
            text = f"Machine {self.node} was ended by {signal_name(ending.signal)}."
        elif first is not None:
            text = f"Rank {first.rank} on machine {self.node} failed: {first}."
        else:
            return
        if self.client is None:  # nobody was there yet
            return
        said = json.dumps({"text": text, "is_over": self.is_over})
        if self.workers is not None:
            self.workers.pass_on(End(text=text, is_final=self.is_over))
        try:
            # The first to tell is the one to believe.
            self.store.set_first(f"failed/{self.attempt}", said)
        except OSError:
            self.is_over = True

    def wait_for_the_others(self) -> str:
        """Wait until all machines have finished; why not, if one fails after all."""
        self.store.set(f"done/{self.attempt}/{self.node}", "1")
        while True:
            # First: a machine that sees that all are done leaves, and is not missed then.
            reason = self.look() if self.workers is None else self._hear_others()
            if all(self.store.has(f"done/{self.attempt}/{node}") for node in self._nodes_left):
                return ""
            if reason:
                return reason
            self._pause(_LOOK_S)

    @property
    def _nodes_left(self) -> list[int]:
        """The machines of this attempt that are not gone."""
        sizes = enumerate(self.sizes)
        return [node for node, size in sizes if size and node not in self.gone]

    def on_machine_gone(self, node: int) -> None:
        """As the lead: do not wait for this machine any more, now and in later attempts."""
        self.gone.add(node)
        self.store.set(f"workers/{node}", "0")
        self.store.set(f"done/{self.attempt}/{node}", "1")

    def _hear_others(self) -> str:
        """Why not to wait for the others any more, as `look`, from their launchers directly."""
        assert self.workers is not None
        for machine in list(self.wires):
            self.workers.on_wire(machine)
        self.workers.keep_in_touch()
        return "" if self.workers.end is None else self.workers.end.text

    def _open_wires(self) -> None:
        """Connect this launcher with the lead's, or as the lead with all others."""
        for wire in self.wires.values():
            wire.close()
        self.wires = {}
        token = self._get("token", LEAD_NAME)
        self.survives = bool(token)
        if not self.survives:
            return
        if sys.platform != "linux":
            raise UsageError(
                "Only workers on Linux can be replaced when they die.",
                advice=f"Start the launcher at {self.endpoint} with --no-survive.",
            )
        secret = env.read_secret()
        if self.server is None:
            key = make_key(secret, token, self.attempt, self.node)
            self.wires[LEAD] = wire = Wire.connect(self.host, self.port, self.node, key)
            wire.send({"said": "hello"})
            self._wait_until(partial(self._await_welcome, wire), _LOOK_S)
            return
        for node in self._nodes_left:
            if node != self.node:
                key = make_key(secret, token, self.attempt, node)
                self._wait_until(partial(self._await_hello, node, key), _LOOK_S)

    def _await_hello(self, node: int, key: bytes) -> str:
        assert self.server is not None
        if node in self.server.lines:
            wire = Wire(*self.server.lines.pop(node), key, is_lead=True)
            try:
                while not wire.receive():
                    self._pause(_LOOK_S)
            except LineBroken as error:
                tell(f"a launcher that called itself machine {node} was refused: {error}.")
                wire.close()
            else:
                wire.send({"do": "begin"})
                self.wires[node] = wire
                return ""
        return f"machine {node}"

    def _await_welcome(self, wire: Wire) -> str:
        try:
            return "" if wire.receive() else LEAD_NAME
        except LineBroken as error:
            raise UsageError(
                f"The launcher at {self.endpoint} does not take this one for a machine of its run.",
                "It has closed the line to this machine.",
                "Set PACELINE_SECRET to the same value on every machine, or on none.",
            ) from error

    def close(self) -> None:
        """Leave. The host stays a moment, so that the others can still read why."""
        is_cut_off = self.workers is not None and self.server is None and not self.wires
        with contextlib.suppress(OSError):
            if is_cut_off:
                raise OSError
            left = self.store.add("left", 1) if self.client is not None else 0
            deadline_s, others = time.monotonic() + LEAVE_S, len(self._nodes_left)
            while self.server and left < others and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
                left = self.store.add("left", 0)
        for end in (*self.wires.values(), self.client, self.server):
            if end is not None:
                end.close()

    def _connect(self) -> None:
        """Serve the store if this machine is the host, and join it as soon as it is there."""
        self.server = self._listen()
        host = self.host
        if self.server is not None:
            is_public = self.server.host == _EVERYWHERE
            self.is_near_store = is_public or self.server.listen_nearby()
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
        if self.server is not None:
            self.store.set("token", secrets.token_hex(16) if self.survives else "")

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
