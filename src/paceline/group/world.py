"""Who takes part in the training, and which of them this process is.

`init_process_group()` finds out from the launcher's environment, or from the arguments of
torch's function of the same name, and returns a `World`. Without a launcher the world is this
one process, so the same script runs under plain `python`.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import init_process_group as make_default_group

from paceline import env
from paceline.env import Placement
from paceline.errors import (
    NotInitializedError,
    PeerError,
    UsageError,
    check_choice,
    check_whole,
)
from paceline.group.device import CPU, pick_backend, take_device
from paceline.group.exit import give_way_at_exit
from paceline.group.membership import Membership
from paceline.group.sockets import CONNECTIONS, StoreClient, interface_towards, is_served, listen
from paceline.group.values import broadcast_value, gather_value, reduce_value
from paceline.torch_private import HashStore, PrefixStore, Store, TCPStore

STORE_TIMEOUT = timedelta(seconds=120)
"""How long a worker waits for rank 0 to serve the store, unless `timeout` is shorter."""
_LATE_S, _GRACE_S = 3.0, 5.0
"""When a wait for the store is told of, and how long torch may take to notice its own timeout."""
_CHECK = "check that MASTER_ADDR and MASTER_PORT are the same on every rank and can be reached"
_FIRST_LOOK_S, _NEAR_LOOK_S, _FAR_LOOK_S = 0.001, 0.02, 0.25
"""Pauses between two looks for the store: the first, the longest on this machine and on others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The workers of one training, seen by one of them."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    device: torch.device = CPU
    group: Any = None
    """The process group, an argument for every class that takes `process_group`."""
    source: str = "alone"
    """Where this was read: a launcher's name, `arguments`, `torch` or `alone`."""
    owns_group: bool = False
    """Whether `close()` should destroy torch's default group."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and saves."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every worker is here."""
        group, ranks = self._meet()
        if len(ranks) > 1:
            dist.barrier(group)

    def gather(self, value: Any, *, grad: bool = False) -> Any:
        """The value of every worker, on all of them: tensors joined along their first dimension.

        Their lengths may differ; a number becomes a tensor with one of every worker. In nested
        containers all tensors are joined; text must be the same everywhere. With `grad` the
        gradient of this worker's rows is that of the sum of what all workers compute from them:
        exactly what `DistributedDataParallel` averages; then every worker runs backward.
        """
        return gather_value(*self._meet(), self.device, value, has_grad=grad)

    def reduce(self, value: Any, op: Literal["sum", "mean"] = "sum") -> Any:
        """The sum, or the mean, over all workers, on all of them.

        Tensors have one shape on all; in nested containers all tensors and numbers are reduced.
        """
        check_choice("op", op, ("sum", "mean"))
        return reduce_value(*self._meet(), self.device, value, op)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """What rank `root` passes, on every worker: tensors, on the host, numbers and text in
        nested containers. What the others pass is not looked at."""
        check_whole("root", root, 0, most=self.size - 1)
        return broadcast_value(*self._meet(), self.device, value, root)

    def _meet(self) -> tuple[Any, dict[int, int]]:
        """The group of those who are there now, and their ranks in it by what they are called here.

        Both are others after a death in a `Run`, and this worker is alone while it waits
        to be let into one.
        """
        if self.group is None:
            return dist.ProcessGroup(HashStore(), 0, 1), {self.rank: 0}
        members = Membership.of(self.group)
        if members.size == 1:
            return members.group, {self.rank: 0}
        return members.group, members.ranks_as_in(self.group, self.size)

    def close(self) -> None:
        """Leave the world: destroy the default group if `init_process_group()` made it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any | None = None,
    device_id: torch.device | int | None = None,
    enable_reconfigure: bool = False,
) -> World:
    """Join the world this process was launched into, as torch's default process group.

    Takes torch's arguments. With none, reads `paceline run`'s, torchrun's or SLURM's environment,
    and makes a world of one where there is none. On a single machine everything listens on
    loopback only. A default group that already exists is used as it is.
    """
    give_way_at_exit()
    if enable_reconfigure:
        raise UsageError(
            "enable_reconfigure=True makes a group that is used after its reconfigure() only.",
            advice="Leave it out: a Run forms a new group when workers die. For torch's own way "
            "call torch.distributed.init_process_group.",
        )
    if dist.is_initialized():
        return current_world()
    _check_backend(backend)
    launched = env.read_launched()
    place = launched.place
    if launched.joins_running:
        return _stand_apart(place, device_id)
    explicit = init_method is not None or store is not None
    if not explicit and (world_size, rank) != (-1, -1):
        place = _placement_from_arguments(place, world_size, rank)
    local_rank, local_size = (place.local_rank, place.local_size) if place else (0, 1)
    device = take_device(backend, local_rank, local_size, device_id)
    backend = backend or pick_backend(device, local_size)
    options: dict[str, Any] = {"timeout": timeout} if timeout is not None else {}
    if device_id is not None and device.type != "cpu":
        options["device_id"] = device
    if explicit:
        options |= {"init_method": init_method, "store": store}
        options |= {"world_size": world_size, "rank": rank}
        source = "arguments"
    elif place is None:
        options |= {"store": HashStore(), "world_size": 1, "rank": 0}
        source = "alone"
    else:
        # A launcher's store outlives groups and attempts: what an earlier one left there is stale.
        prefix = f"paceline/{launched.attempt}/{next(_groups)}"
        met = PrefixStore(prefix, connect(place, timeout))
        CONNECTIONS.kept_port = place.master_port
        options |= {"store": met, "world_size": place.size, "rank": place.rank}
        source = place.source
    if place is None or place.is_single_node:
        env.bind_gloo(env.loopback_interface())
    else:  # `paceline run` has done it already; torchrun and srun do not
        env.bind_gloo(interface_towards(place.master_addr))
    with CONNECTIONS.recorded():
        make_default_group(backend, group_name=group_name, pg_options=pg_options, **options)
    return replace(_describe(place), device=device, source=source, owns_group=True)


def init_as_torch(*args: Any, **kwargs: Any) -> None:
    """What torch's function does, where a worker may die and be replaced.

    The launcher's store then still has the addresses of the first group, which is gone: to join
    that one would take for ever.
    """
    launched = env.read_launched()
    if launched.joins_running:
        _stand_apart(launched.place, kwargs.get("device_id"))
        return
    if launched.place is not None:
        CONNECTIONS.kept_port = launched.place.master_port
    with CONNECTIONS.recorded():
        make_default_group(*args, **kwargs)


def _stand_apart(place: Placement | None, device_id: torch.device | int | None) -> World:
    """The world of a worker that replaces another: alone until its run joins the others."""
    assert place is not None
    device = take_device(None, place.local_rank, place.local_size, device_id)
    with env.gloo_on_loopback():  # whatever has become of the way to other machines
        make_default_group("gloo", store=HashStore(), rank=0, world_size=1)
    _apart.add(dist.group.WORLD)
    return replace(_describe(place), device=device, source=place.source, owns_group=True)


def _check_backend(backend: object) -> None:
    """Refuse what torch would answer with an assertion, or only while it connects."""
    parts = backend.split(",") if isinstance(backend, str) else [] if backend is None else [""]
    for name in [part.rpartition(":")[2].strip().lower() for part in parts]:
        is_known = name in dist.Backend.backend_list
        if not is_known or not getattr(dist, f"is_{name}_available", lambda: True)():
            raise UsageError(
                f"backend is {backend!r:.80}, which this torch does not have.",
                advice='Leave it out, or pass "gloo", "nccl" or "cpu:gloo,cuda:nccl".',
            )


_apart: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups of replacements that stand apart from the others, for whom the launcher names a place."""
_groups = count()
"""How many groups this process has made; the same on every rank."""


def current_world() -> World:
    """Describe the default process group that already exists, created here or by the script."""
    return _describe(env.read_placement())


def _describe(place: Placement | None) -> World:
    group = default_group()
    if torch.cuda.is_available() and "nccl" in dist.get_backend(group):
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = CPU
    known = place if place is not None and group in _apart else None
    return World(
        rank=group.rank() if known is None else known.rank,
        size=group.size() if known is None else known.size,
        local_rank=place.local_rank if place else 0,
        local_size=place.local_size if place else 1,
        node=place.node if place else 0,
        device=device,
        group=group,
        source="torch",
    )


def default_group() -> Any:
    """Torch's default process group; an error of ours when there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        raise NotInitializedError(
            "There is no process group yet.",
            advice="Call paceline.init_process_group() first, or pass process_group=.",
        )
    return dist.group.WORLD


def _placement_from_arguments(place: Placement | None, size: int, rank: int) -> Placement | None:
    if size < 1 or not 0 <= rank < size:
        raise UsageError(
            f"world_size={size} with rank={rank} is impossible.",
            advice="Pass both, with rank from 0 to world_size - 1, or neither.",
        )
    if place is None and size > 1:
        raise UsageError(
            f"world_size={size} was passed, but nothing says where the others are.",
            advice="Set MASTER_ADDR and MASTER_PORT, pass init_method= or store=, or start with "
            "`paceline run`.",
        )
    if place is not None and (place.size, place.rank) != (size, rank):
        raise UsageError(
            f"rank {rank} of {size} was passed, but {place.source} says rank {place.rank} "
            f"of {place.size}.",
            advice="Leave rank and world_size out; the launcher knows them.",
        )
    return place


def connect(place: Placement, timeout: timedelta | None) -> Store:
    """The store the workers meet at: served by rank 0 unless the launcher serves it."""
    if place.store:
        return launcher_store(place.store)
    if place.size == 1 and not place.agent_has_store:
        return HashStore()
    is_server = place.rank == 0 and not place.agent_has_store
    is_local = place.is_single_node and not place.agent_has_store
    address = env.LOOPBACK if is_local else place.master_addr
    serve: dict[str, Any] = {}
    if is_server:
        # torch itself would listen on every interface.
        serve = {"master_listen_fd": listen(address, place.master_port).detach()}
    patience = min(timeout or STORE_TIMEOUT, STORE_TIMEOUT)
    found: list[Store | Exception] = []

    def connect() -> None:
        left = patience
        if not is_server:
            left -= _wait_until_served(address, place.master_port, patience)
        try:
            options: dict[str, Any] = {
                "timeout": max(left, timedelta(seconds=1)),
                "wait_for_workers": False,
            }
            found.append(
                TCPStore(address, place.master_port, place.size, is_server, **options, **serve)
            )
        except Exception as error:
            found.append(error)

    # In a thread, because torch waits without limit for one that accepts and does not answer.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_LATE_S)
    where = f"{address}, port {place.master_port}"
    if not found:
        text = f"paceline: rank {place.rank} still waits for the store at {where}; {_CHECK}."
        print(text, file=sys.stderr, flush=True)
        thread.join(patience.total_seconds() + _GRACE_S)
    if found and isinstance(found[0], Store):
        return found[0]
    reason = str(*found).partition("\n")[0][:200] or "there is no answer"
    raise PeerError(
        f"Rank {place.rank} of {place.size} found no store at {where}, within "
        f"{patience.total_seconds():.0f} s.",
        f"The address comes from {place.source}; {reason}.",
        f"Look for an error on rank 0, and {_CHECK}.",
    )


class LauncherStore(StoreClient, Store):
    """The launcher's store as torch makes groups with it, with torch's errors."""

    gone, late = dist.DistNetworkError, dist.DistStoreError

    def __init__(self, place: str) -> None:
        Store.__init__(self)
        StoreClient.__init__(self, place)


@cache
def launcher_store(place: str) -> LauncherStore:
    """The one at this place, for as long as the process lives.

    torch keeps only its own half of the object, which is of no use without the other.
    """
    return LauncherStore(place)


def _wait_until_served(address: str, port: int, patience: timedelta) -> timedelta:
    """Wait until something listens there; how long that took.

    torch's store would wait half a second and more before it tried again, while rank 0 is
    usually there a few milliseconds later.
    """
    start = time.monotonic()
    longest = _NEAR_LOOK_S if env.is_loopback(address) else _FAR_LOOK_S
    pause = _FIRST_LOOK_S
    while not is_served(address, port):
        if time.monotonic() + pause > start + patience.total_seconds():
            break
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return timedelta(seconds=time.monotonic() - start)
