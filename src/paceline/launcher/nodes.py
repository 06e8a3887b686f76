"""The machines of a run: their launchers meet at one, which numbers them, and end together.

The launcher that owns the address given leads: it serves the store for the workers of all machines,
and decides who trains if workers die. The others connect with it, and a channel to each stays open
to the end. With `--node-rank` the machines bring their numbers; otherwise they get them as they
arrive. A machine that is alone leads, and does not wait.

      a follower                the lead
    hello, with its workers --->
                            <---  welcome, when all are there: its number, all machines' workers
    ready                   --->
                            <---  begin, when all are: an attempt, during which workers speak
    done                    --->
                            <---  done, when all are
"""

from __future__ import annotations

import errno
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from paceline import env
from paceline.env import Placement, is_loopback
from paceline.errors import PeerError, UsageError
from paceline.group import NONCE_BYTES, make_key
from paceline.launcher.channel import Channel, ChannelBroken, Connector
from paceline.launcher.deaths import RunResult, StopReason, signal_name
from paceline.launcher.follower import Follower
from paceline.launcher.generations import Generations
from paceline.launcher.process import SignalInbox
from paceline.launcher.roster import FORMING_S, Roster
from paceline.launcher.run import LocalRun
from paceline.launcher.store import StoreServer

# Both are torchrun's.
JOIN_TIMEOUT_S = 600.0
LAST_CALL_S = 30.0
LEAD = -1
"""Under which other machines keep their channel to the lead."""
FOLLOWER_GRACE_S, LEAD_GRACE_S = 3.0, 5.0
"""What comes on top of `--machine-timeout`, to connect anew. Who is cut off ends its workers before
the lead continues without them: two must never write."""
LEAVE_S = 5.0
_LOOK_S = 0.05
_NOTICE_S = 4.0
_EVERYWHERE = "0.0.0.0"
_NOT_OURS = {errno.EADDRINUSE, errno.EADDRNOTAVAIL}


class Interrupted(Exception):
    """A signal came while this machine was waiting for others."""


def run_on_machines(run: LocalRun) -> int:
    """This machine's part of a run; the exit code."""
    rendezvous = Rendezvous(run)
    try:
        size = rendezvous.arrive(run.local_size)
        run_attempt = partial(_run_attempt, run, rendezvous)
        return run.run_attempts(run_attempt, size, lambda: rendezvous.is_over)
    except Interrupted as interrupted:
        stopped = RunResult((), StopReason.by_signal(interrupted.args[0]))
        by = signal_name(interrupted.args[0])
        rendezvous.quit(f"Machine {rendezvous.node} was ended by {by}.")
        run.console.say(str(stopped))
        return stopped.exit_code
    except PeerError as error:
        rendezvous.quit(error.what)
        raise
    finally:
        rendezvous.close()


def _run_attempt(run: LocalRun, rendezvous: Rendezvous, attempt: int) -> RunResult:
    first = rendezvous.meet()
    rendezvous.workers = workers = _make_workers(run, rendezvous)
    result = run.run(first, attempt, workers, rendezvous.server)
    if result.reason is None:
        return replace(result, stop=rendezvous.wait_for_the_others())
    rendezvous.tell_failure(result.reason)
    return result


def _make_workers(run: LocalRun, rendezvous: Rendezvous) -> Generations | Follower:
    """What tells the other machines about the workers of this one, and keeps them alive."""
    alike: dict[str, Any] = {"say": run.console.tell, "channels": rendezvous.channels}
    alike |= {name: getattr(rendezvous, name) for name in ("survives", "survives_errors")}
    if rendezvous.server is None:
        silence_s = rendezvous.patience_s + FOLLOWER_GRACE_S
        return Follower(**alike, silence_s=silence_s, lead=LEAD, lead_name=rendezvous.lead_name)
    machines = [node for node, size in enumerate(rendezvous.sizes) for _ in range(size)]
    least, size = run.options.min_workers, len(machines)
    if least > size:
        raise UsageError(
            f"--min-workers is {least}, but there are {size} workers.",
            advice="Use a number from 1 to that of --workers.",
        )
    roster = Roster(
        size=size,
        min_workers=least,
        max_replacements=run.options.max_restarts,
        machine_by_worker={} if run.options.is_single_node else dict(enumerate(machines)),
        here=rendezvous.node,
        patience_s=max(FORMING_S, 2 * run.options.machine_timeout),
        deaths=run.deaths,
    )
    return Generations(
        **alike,
        silence_s=rendezvous.patience_s + LEAD_GRACE_S,
        roster=roster,
        is_run=run.is_run,
        on_machine_gone=rendezvous.on_machine_gone,
        give_up_keys=rendezvous.server.give_up,
    )


class Rendezvous:
    """The machines of one run, seen by one of them."""

    def __init__(self, run: LocalRun) -> None:
        options = run.options
        self.inbox, self.folder, self.tell = run.inbox, run.private, run.console.tell
        self.key = make_key(env.read(env.SECRET_VARIABLE), run.run_id)
        self.host, self.port = options.meeting_point
        self.endpoint = f"{self.host}:{self.port}"
        self.lead_name = f"The machine at {self.endpoint}, where all meet,"
        self.least, self.most = options.nnodes
        self.is_alone = options.is_single_node
        conf = options.rdzv_conf
        self.number = options.node_rank if options.rdzv_backend == "static" else None
        """This machine's number; None where machines are numbered as they arrive."""
        self.must_host = conf.get("is_host") if self.number is None else self.number == 0
        """Whether this machine leads; None if that is for its address to say."""
        self.join_timeout_s = conf.get("join_timeout", conf.get("timeout", JOIN_TIMEOUT_S))
        self.last_call_s = conf.get("last_call_timeout", LAST_CALL_S)
        self.deadline_s = time.monotonic() + self.join_timeout_s
        self.patience_s = options.machine_timeout
        """How long a machine may be out of reach: as the lead wants it."""
        self.survives = run.survives
        self.survives_errors = options.survive_errors
        """Whether trainings survive the death of workers, and exceptions: as the lead wants it."""
        self.node = -1 if self.number is None else self.number
        self.sizes: list[int] = []
        """Workers by machine; none on those that are gone."""
        self.is_over = False
        """A machine was told to stop, so none restarts."""
        self.channels: dict[int, Channel] = {}
        """Channels to the other machines, or to the lead."""
        self.workers: Generations | Follower | None = None
        self.server: StoreServer | None = None
        self.connector: Connector | None = None

    def arrive(self, local_size: int) -> int:
        """Wait until every machine has a number; how many workers there are on all."""
        if self.is_alone:
            self.server = StoreServer(self.folder, self.host, self.port)
            self.host, self.port = self.server.host, self.server.port
            self.node, self.sizes = 0, [local_size]
            return local_size
        self.server = self._listen()
        if self.server is None:
            self._join(local_size)
        else:
            self.server.start()
            if not is_loopback(self.host) and not env.read(env.SECRET_VARIABLE):
                self.tell(
                    f"PACELINE_SECRET is not set: whoever can reach {self.endpoint} can take part "
                    "in this run."
                )
            self._gather(self.server, local_size)
        return sum(self.sizes)

    def meet(self) -> Placement:
        """Wait until every machine is ready for the next attempt; the place of our first worker."""
        self.deadline_s = time.monotonic() + self.join_timeout_s
        if self.server is not None:
            # Some may have said so while workers of the last attempt still ran here.
            ready = self.workers.reached["ready"] if self.workers is not None else set()

            def missing() -> str:
                for node in self.channels:
                    if {"machine": "ready"} in self._hear(node):
                        ready.add(node)
                return next((f"machine {node}" for node in self.channels if node not in ready), "")

            self._wait_until(missing)
            self.server.clear()  # the last attempt's workers have ended everywhere
            self.server.make_room(sum(self.sizes))
            self._send_all({"do": "begin", "sizes": self.sizes})
        else:
            self._send_all({"machine": "ready"})
            self.sizes = self._await("begin")["sizes"]
        return Placement(
            rank=sum(self.sizes[: self.node]),
            size=sum(self.sizes),
            local_size=self.sizes[self.node],
            node=self.node,
            nodes=len(self.sizes),
            master_addr=self.host,
            master_port=self.port,
            store=self.endpoint if self.server is None else self.server.path,
        )

    def tell_failure(self, reason: StopReason) -> None:
        """Tell the other machines why this machine's workers ended, unless they told us."""
        assert self.workers is not None
        end = self.workers.end
        self.is_over = self.is_over or bool(reason.signal) or (end is not None and end.is_final)
        if end is None:  # else all were told, or are gone
            self.workers.pass_on(replace(reason, is_final=self.is_over))

    def wait_for_the_others(self) -> StopReason | None:
        """Wait until all machines have finished; why not, if one fails after all."""
        assert self.workers is not None
        if self.server is None:
            self._send_all({"machine": "done"})
        while not self.workers.reached["done"] >= self.channels.keys():
            self.workers.keep_in_touch()
            if self.workers.end is not None:
                return self.workers.end
            self._pause(_LOOK_S)
        if self.server is not None:
            self._send_all({"machine": "done"})
        return None

    def on_machine_gone(self, node: int) -> None:
        """As the lead: do not wait for this machine any more, now and in later attempts."""
        self.sizes[node] = 0

    def quit(self, why: str) -> None:
        """Tell the others that this machine will not take part."""
        self._send_all({"do": "quit", "why": why})

    def close(self) -> None:
        """Leave, when the others have been told why."""
        deadline_s = time.monotonic() + LEAVE_S
        gone = [] if self.workers is None else self.workers.broken
        for channel in gone:
            channel.close()
        for channel in self.channels.values():
            channel.close(linger_s=max(0.0, deadline_s - time.monotonic()))
        for end in (self.connector, self.server):
            if end is not None:
                end.close()

    def _join(self, local_size: int) -> None:
        """As another machine than the lead: connect with it, and get a number."""
        # By it the lead knows this launcher again when it connects anew.
        name = secrets.token_bytes(NONCE_BYTES)
        connector = self.connector = Connector(self.endpoint, self.key, name)
        self.channels[LEAD] = Channel(connector, is_lead=False)
        self._send_all({"said": "hello", "node": self.number, "workers": local_size})
        welcome = self._await("welcome")
        self.node, self.sizes = welcome["node"], welcome["sizes"]
        self.patience_s, self.survives = welcome["patience_s"], welcome["survives"]
        self.survives_errors = welcome["survives_errors"]
        if self.survives and sys.platform != "linux":
            raise UsageError(
                "Only workers on Linux can be replaced when they die.",
                advice=f"Start the launcher at {self.endpoint} with --no-survive.",
            )

    def _await(self, what: str) -> dict[str, Any]:
        """What the lead says when all are there."""
        found: list[dict[str, Any]] = []
        connector = self.connector
        assert connector is not None

        def missing() -> str:
            if connector.is_refused:
                raise UsageError(
                    f"The launcher at {self.endpoint} does not take this one for a machine of its "
                    "run.",
                    advice="Set PACELINE_SECRET to the same value on every machine, or on none, "
                    "and give all the same --rdzv-id.",
                )
            for message in self._hear(LEAD):
                match message:
                    case {"do": "refuse", "what": problem, "advice": advice}:
                        raise UsageError(problem, advice=advice)
                    case {"do": do} if do == what:
                        found.append(message)
            if connector.problem is not None:
                return f"a launcher to listen there ({connector.problem})"
            return "" if found else "the other machines"

        self._wait_until(missing)
        return found[0]

    def _gather(self, server: StoreServer, local_size: int) -> None:
        """As the lead: number the machines as they come, until all are there."""
        self.node = max(self.node, 0)
        size_by_node, callers = {self.node: local_size}, dict[bytes, Channel]()
        count, last_call_s = 0, 0.0

        def missing() -> str:
            nonlocal count, last_call_s
            for name in server.channels.keys() - callers.keys():
                # What the machine has connected anew with, if it has.
                renew = lambda _, name=name: server.channels.pop(name, None)  # noqa: E731
                callers[name] = Channel(renew, is_lead=True)
            for channel in callers.values():
                self._admit(channel, size_by_node)
            if len(size_by_node) != count:
                count, last_call_s = len(size_by_node), time.monotonic() + self.last_call_s
            if count == self.most or (self.number is None and self.least <= count):
                return "" if count == self.most or time.monotonic() > last_call_s else "more"
            if self.number is None:
                return f"{self.least} machines"
            return next(f"machine {node}" for node in range(self.most) if node not in size_by_node)

        self._wait_until(missing)
        server.admitted = {name for name, each in callers.items() if each in self.channels.values()}
        self.sizes = [size_by_node[node] for node in sorted(size_by_node)]
        for node, channel in self.channels.items():
            welcome = {"node": node, "sizes": self.sizes, "survives": self.survives}
            welcome |= {"patience_s": self.patience_s, "survives_errors": self.survives_errors}
            channel.send({"do": "welcome", **welcome})

    def _admit(self, channel: Channel, size_by_node: dict[int, int]) -> None:
        """Give a machine that says hello its number; one that has left again has none."""
        node = next((node for node, each in self.channels.items() if each is channel), None)
        channel.beat(time.monotonic())
        try:
            heard = channel.receive()
        except ChannelBroken:
            if node is not None:
                del self.channels[node], size_by_node[node]
            return
        for message in heard:
            match message:
                case {"do": "quit", "why": str(why)}:
                    raise PeerError(why)
                case {"said": "hello", "node": wanted, "workers": int(workers)}:
                    free = [n for n in range(self.most) if n not in size_by_node]
                    node = wanted if self.number is not None else min(free, default=None)
                    if node in free:
                        self.channels[node], size_by_node[node] = channel, workers
                        continue
                    problem, advice = (
                        (
                            f"This run has its {self.most} machines already.",
                            "Raise --nnodes, or give this run another --rdzv-id.",
                        )
                        if node is None
                        else (
                            f"Two machines say that they are number {node}, or there are fewer.",
                            "Give each machine its own --node-rank, below --nnodes.",
                        )
                    )
                    channel.send({"do": "refuse", "what": problem, "advice": advice})

    def _hear(self, node: int) -> list[dict[str, Any]]:
        """What a machine says while all wait; of an attempt that is over, what it said last."""
        try:
            heard = self.channels[node].receive()
        except ChannelBroken as error:
            whom = f"Machine {node}" if node != LEAD else self.lead_name
            raise PeerError(f"{whom} is gone: {error}.") from error
        for message in heard:
            if message.get("do") == "quit":
                raise PeerError(message["why"])
        return heard

    def _send_all(self, message: dict[str, Any]) -> None:
        for channel in self.channels.values():
            channel.send(message)

    def _serve(self, host: str) -> StoreServer:
        return StoreServer(self.folder, host, self.port, self.key)

    def _listen(self) -> StoreServer | None:
        """The store if this machine is the host: the one that owns the address."""
        if self.must_host is not None and not self.must_host:
            return None
        try:
            return self._serve(_bind_address(self.host))
        except UsageError as error:
            code = getattr(error.__cause__, "errno", None)
            if self.must_host or self.host in {socket.gethostname(), socket.getfqdn()}:
                if code == errno.EADDRNOTAVAIL:  # behind an address that only others see
                    return self._serve(_EVERYWHERE)
                raise
            if code not in _NOT_OURS and not isinstance(error.__cause__, socket.gaierror):
                raise
            return None

    def _wait_until(self, missing: Callable[[], str]) -> None:
        """Wait until nothing is missing any more; say now and then what is, and give up at last."""
        notice_at_s = time.monotonic() + _NOTICE_S
        while whom := missing():
            now_s = time.monotonic()
            for channel in self.channels.values():
                channel.beat(now_s)
            if now_s > self.deadline_s:
                raise PeerError(
                    f"Waited {self.join_timeout_s:g} s at {self.endpoint} for {whom}.",
                    advice="Start the launcher on every machine with the same --nnodes and "
                    "--rdzv-id, check the address and the firewall, or allow more time with "
                    "--rdzv-conf join_timeout=S.",
                )
            if now_s > notice_at_s:
                self.tell(f"waiting at {self.endpoint} for {whom}.")
                notice_at_s = now_s + 2 * _NOTICE_S
            self._pause(_LOOK_S)

    def _pause(self, seconds: float) -> None:
        sources: list[SignalInbox | Channel] = [self.inbox, *self.channels.values()]
        ready, _, _ = select.select(sources, [], [], seconds)
        ended_by = len(self.inbox.seen)
        if self.inbox in ready and self.inbox.read() and self.inbox.seen[ended_by:]:
            raise Interrupted(self.inbox.seen[ended_by])


def _bind_address(host: str) -> str:
    """The address to listen on: the one given, so that no other interface is open.

    A machine's own name often resolves to loopback on that machine, where no other could
    reach it; only then is it every interface.
    """
    if is_loopback(host):
        return host
    try:
        return _EVERYWHERE if is_loopback(socket.gethostbyname(host)) else host
    except OSError:
        return host
