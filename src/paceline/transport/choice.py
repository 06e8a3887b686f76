"""Which transport a model gets: decided by all ranks together, once, when it is wrapped."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from typing import Literal, cast, get_args

import torch

from paceline import comm, env
from paceline.comm import Group
from paceline.errors import UsageError
from paceline.transport.between_hosts import BetweenHosts
from paceline.transport.c10d import C10d
from paceline.transport.heap import keep_freed_memory
from paceline.transport.hosts import group_by_host, host_identity, why_memory_cannot_be_shared
from paceline.transport.interface import Transport
from paceline.transport.peers import Peers
from paceline.transport.shared_memory import SharedMemory, open_channel

Kind = Literal["auto", "shared_memory", "c10d"]

log = logging.getLogger("paceline.transport")


def check_kind(kind: str) -> Kind:
    """The name, or an error if it is no transport's."""
    if kind not in get_args(Kind):
        names = ", ".join(repr(name) for name in get_args(Kind))
        raise UsageError(f"transport is {kind!r}.", advice=f"Use one of {names}.")
    return cast("Kind", kind)


class TransportChoice:
    """A transport that is chosen when it is first needed, because choosing takes all ranks.

    One rank alone may copy or load a wrapped model; only training it is done by all.
    """

    def __init__(self, group: Group, devices: Sequence[torch.device], kind: Kind) -> None:
        self._arguments = group, devices, kind
        self._chosen: Transport | None = None

    def get(self) -> Transport:
        """The transport; the first call must be made by all ranks at the same point."""
        if self._chosen is None:
            self._chosen = choose_transport(*self._arguments)
        return self._chosen

    @property
    def description(self) -> str:
        return self._chosen.description if self._chosen else "not chosen yet"


def choose_transport(group: Group, devices: Sequence[torch.device], kind: Kind) -> Transport:
    """The fastest transport that all ranks can use, or the one asked for.

    All ranks of the group must call it. `kind` may differ between them: one rank that cannot or
    does not want to share memory decides for all.
    """
    if kind == "auto":
        kind = check_kind(env.read_transport() or "auto")
    if group.size() == 1:
        return C10d(group, "a world of one has nothing to send")
    others = sorted({device.type for device in devices if device.type != "cpu"})
    if others and kind != "shared_memory":
        return C10d(group, f"the model is on {', '.join(others)}")  # the usual case there
    obstacle = (
        "it was asked for"
        if kind == "c10d"
        else f"the model is on {', '.join(others)}"
        if others
        else why_memory_cannot_be_shared()
    )
    mine = [host_identity(), os.getpid(), obstacle, secrets.token_hex(8)]
    everyone = comm.exchange(group, mine, torch.device("cpu"), "Choosing a transport")
    transport, why = _try_to_share(group, everyone)
    if transport is not None:
        keep_freed_memory()
        return transport
    if kind == "shared_memory":
        raise UsageError(
            f"Rank {group.rank()} asked for shared memory, but {why}.",
            advice="Use transport='auto' to fall back to torch.distributed in such a case.",
        )
    level = logging.INFO if kind == "c10d" else logging.WARNING
    if group.rank() == 0:
        log.log(level, "Gradients go through c10d instead of shared memory: %s.", why)
    return C10d(group, why)


def _try_to_share(group: Group, everyone: Sequence[list[str]]) -> tuple[Transport | None, str]:
    for rank, (_, _, obstacle, _) in enumerate(everyone):
        if obstacle:
            return None, f"on rank {rank} {obstacle}"
    hosts = group_by_host([entry[0] for entry in everyone], group.rank())
    if max(map(len, hosts.ranks_by_host)) == 1:
        return None, "every rank is on a host of its own"
    neighbours = hosts.neighbours
    peers = Peers(group, neighbours, [int(everyone[rank][1]) for rank in neighbours])
    channel, problem = open_channel(group, hosts, peers)
    if channel is None:
        peers.close()
        return None, problem
    if len(hosts.ranks_by_host) == 1:
        return SharedMemory(group, hosts, peers, channel), ""
    name = everyone[0][3]  # another one for every model
    return BetweenHosts(group, hosts, peers, channel, name), ""
