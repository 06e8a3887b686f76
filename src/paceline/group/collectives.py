"""The only door to collectives: each one has a name, and each failure names a rank.

Gloo reports a dead neighbour as a bare `RuntimeError` and a late one as a timeout; neither says
who. So a rank that leaves or fails writes its last words into the group's store, and a rank whose
collective fails reads them there before it raises.
"""

from __future__ import annotations

import ctypes
import json
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import errors
from paceline.errors import DesyncError, PacelineError, PeerError, message_of, name_ranks
from paceline.group.device_waits import DeviceWaits
from paceline.group.sockets import CONNECTIONS
from paceline.torch_private import PrefixStore, gloo_like, has_cpu_backend

Group = Any
"""A `torch.distributed.ProcessGroup`, whose methods torch does not type."""

# Another rank says how long its message is: bounded before memory is taken for it.
EXCHANGE_LIMIT_BYTES = 64 * 2**20
_HEAD_BYTES, _NAME_BYTES = 1024, 64

_WORDS_KEY = "paceline/last-words/{rank}"
_WORDS_LIMIT_CHARS = 2000
_words_patience_s = [0.3]


class Pending:
    """A collective that has started; `wait()` returns when its tensor holds the result."""

    __slots__ = ("_group", "_is_on_host", "_what", "_work")

    def __init__(self, work: Any, group: Group, what: str, is_on_host: bool) -> None:
        self._work = work
        self._group = group
        self._what = what
        self._is_on_host = is_on_host
        if _is_aborted[0] is not None:
            _under_way.add(self)

    def is_completed(self) -> bool:
        """Whether `wait()` would return, or raise, at once."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        try:
            if (is_aborted := _is_aborted[0]) is None:
                self._work.wait()
                if not self._is_on_host and self._group.size() > 1:
                    _device_waits.note(self._group, self._what)
            elif self._is_on_host:
                self._wait_on_host(is_aborted)
            else:
                self._wait_on_device(is_aborted)
        except RuntimeError as error:
            raise explain_failure(self._group, self._what, error) from error

    def _wait_on_host(self, is_aborted: Callable[[], bool]) -> None:
        was_aborted = False
        while True:
            try:
                self._work.wait(_GLANCE)
                break
            except RuntimeError:
                if self._work.is_completed():  # with an error, or just after the time was up
                    _under_way.discard(self)
                    self._work.wait()
                    return
            # Not at once after the abort: for one more glance its own error may come.
            if was_aborted:
                raise RuntimeError("it was aborted")
            was_aborted = is_aborted()
        _under_way.discard(self)

    def _wait_on_device(self, is_aborted: Callable[[], bool]) -> None:
        self._work.wait()
        while not self._work.is_completed():
            time.sleep(_LOOK_S)
        _under_way.discard(self)
        if is_aborted():
            raise RuntimeError("it was aborted")


_is_aborted: list[Callable[[], bool] | None] = [None]
_under_way: set[Pending] = set()
"""What was started since aborting was set up, and has not been waited for to its end."""
_LOOK_S = 50e-6
_GLANCE = timedelta(seconds=0.25)
_END_S = 0.5
_LOST_S = 1.0  # for the last words of a rank, or the error of a wait, to show


def refuse_aborted(is_aborted: Callable[[], bool]) -> None:
    """From now on no wait outlives the group that it is in, and what was aborted is refused.

    A failure is explained at once: the caller finds out who is gone.
    """
    # A collective of NCCL's that is aborted ends as if it had succeeded, with whatever is in
    # memory; and what was started on the device after it goes on with that. So all are waited for
    # on the host. One of Gloo's ends with an error, but for a rare race: a message for which the
    # other side just asked, and which can be sent no more, is forgotten, and who waits for it waits
    # for ever.
    _is_aborted[0], _words_patience_s[0] = is_aborted, 0.0
    _device_waits.stop()


def is_aborted() -> bool:
    """Whether the group of this process was aborted, so that others have left it or will."""
    return (look := _is_aborted[0]) is not None and look()


def have_ended() -> bool:
    """Forget what was started in an aborted group; False if some of it has not even ended now."""
    deadline_s = time.monotonic() + _END_S
    while any(not each.is_completed() for each in _under_way):
        if time.monotonic() > deadline_s:
            _under_way.clear()
            return False
        time.sleep(0.001)
    _under_way.clear()
    return True


def start_all_reduce(group: Group, tensor: Tensor, what: str) -> Pending:
    """Start summing `tensor` over the group, in place."""
    return _start(group, what, tensor, lambda: group.allreduce([_real(tensor)]))


def start_broadcast(
    group: Group, tensor: Tensor, root: int, what: str, *, blame: Group | None = None
) -> Pending:
    """Start overwriting `tensor` with the one of rank `root`, counted within the group.

    `blame` is the group whose ranks an error names, if it is another.
    """
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return _start(blame or group, what, tensor, lambda: group.broadcast([_real(tensor)], options))


def _start(group: Group, what: str, tensor: Tensor, collective: Callable[[], Any]) -> Pending:
    if _device_waits.error is not None:
        raise _device_waits.error
    try:
        return Pending(collective(), group, what, tensor.is_cpu)
    except RuntimeError as error:
        raise explain_failure(group, what, error) from error


def _real(tensor: Tensor) -> Tensor:
    if not tensor.is_complex():
        return tensor
    # What lies in memory: where that is to be conjugated, so is its sum.
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


_MOST_WAITS = 10_000


class Waits:
    """When this rank waits for the others of a group, noted for whoever measures its time.

    Written by the training thread; the numbers may be read from other threads.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.since_ns = 0
        """When the wait under way began; 0 without one."""
        self.until_ns = 0
        """When the last one ended."""
        self.is_elsewhere = False
        """Whether the one under way is for a process outside of the group."""
        self.over: deque[tuple[int, int]] = deque(maxlen=_MOST_WAITS)
        """When those began and ended that are not accounted for yet; the last ones of a
        script that exchanges without end and takes no step."""


def follow_waits(group: Group, waits: Waits) -> None:
    """From now on every wait for ranks of the group is noted there."""
    _waits[group] = waits


_waits: weakref.WeakKeyDictionary[Group, Waits] = weakref.WeakKeyDictionary()


@contextmanager
def waiting(group: Group, *, elsewhere: bool = False) -> Iterator[None]:
    """To be put around whatever else waits for ranks of the group, or for a process `elsewhere`."""
    waits = _waits.get(group)
    if waits is None or waits.since_ns:  # inside another
        yield
        return
    waits.is_elsewhere, waits.since_ns = elsewhere, waits.clock()
    try:
        yield
    finally:
        waits.until_ns = waits.clock()
        waits.over.append((waits.since_ns, waits.until_ns))
        waits.since_ns, waits.is_elsewhere = 0, False


def all_reduce(group: Group, tensor: Tensor, what: str) -> None:
    """Sum `tensor` over the group, in place."""
    if group.size() == 1:  # a run of one worker has a group without a backend
        return
    with waiting(group):
        start_all_reduce(group, tensor, what).wait()


def broadcast(
    group: Group, tensor: Tensor, root: int, what: str, *, blame: Group | None = None
) -> None:
    """Overwrite `tensor` with the one of rank `root`; see `start_broadcast`."""
    with waiting(group):
        start_broadcast(group, tensor, root, what, blame=blame).wait()


def all_gather(group: Group, tensor: Tensor, what: str) -> list[Tensor]:
    """The tensors of all ranks, in rank order; all must have one shape and dtype."""
    if group.size() == 1:
        return [tensor.clone()]
    real = _real(tensor.resolve_conj())
    with waiting(group):
        gathered = _gather(group, real, what)
    return list(map(torch.view_as_complex, gathered)) if tensor.is_complex() else gathered


def exchange(group: Group, value: Any, device: torch.device, what: str) -> list[Any]:
    """The JSON values of all ranks, in rank order. Where one has an error instead, all raise it."""
    problem: list[str] = []
    if isinstance(value, PacelineError):
        problem = [type(value).__name__, value.what, value.where, value.advice]
    elif isinstance(value, Exception):
        problem = [DesyncError.__name__, message_of(value)]
    word = json.dumps([None if problem else value, problem]).encode()
    told = list(map(json.loads, gather_bytes(group, word, device, what, EXCHANGE_LIMIT_BYTES)))
    for rank, (_, theirs) in enumerate(told):
        if theirs:
            kind = getattr(errors, theirs[0], DesyncError)
            raise value if problem else kind(f"Rank {rank}: {theirs[1]}", *theirs[2:])
    return [each for each, _ in told]


def gather_bytes(
    group: Group, data: bytes, device: torch.device, what: str, limit: int = 2**31
) -> list[bytes]:
    """The bytes of all ranks, in rank order; in one message if they are few."""
    if group.size() == 1:
        return [data]
    name = what.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    framed = name + len(data).to_bytes(8, "little") + data
    begin = len(name) + 8
    with waiting(group):
        heads = _gather_padded(group, framed[:_HEAD_BYTES], _HEAD_BYTES, device, what)
        # The same on all ranks, which therefore raise together, or send another message together.
        _refuse_other_calls([head[: len(name)] for head in heads])
        sizes = [begin + int.from_bytes(head[len(name) : begin], "little") for head in heads]
        longest = max(sizes)
        if longest > limit:
            raise DesyncError(f"{what}: a message of {longest:,} bytes is over the limit.")
        if longest > _HEAD_BYTES:
            heads = _gather_padded(group, framed, longest, device, what)
        return [head[begin:size] for head, size in zip(heads, sizes, strict=True)]


def _refuse_other_calls(names: Sequence[bytes]) -> None:
    """Raise if ranks have met in calls that do not belong together."""
    calls = [name.rstrip(b"\0").decode(errors="replace") for name in names]
    if (rank := next((r for r, call in enumerate(calls) if call != calls[0]), None)) is not None:
        raise DesyncError(
            "The ranks do not make the same calls.",
            f"First difference: rank 0 is at {calls[0]!r}, rank {rank} at {calls[rank]!r}.",
            "Look for a call in a branch that only some ranks take, such as `if world.is_main:`, "
            "that all of them have to make.",
        )


def _gather_padded(
    group: Group, data: bytes, length: int, device: torch.device, what: str
) -> list[bytes]:
    padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
    together = torch.cat(_gather(group, padded.to(device), what)).cpu()
    sent = ctypes.string_at(together.data_ptr(), together.numel())
    return [sent[start : start + length] for start in range(0, len(sent), length)]


def _gather(group: Group, tensor: Tensor, what: str) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    _start(group, what, tensor, lambda: group.allgather([gathered], [tensor])).wait()
    return gathered


def gloo_subgroup(group: Group, ranks: Sequence[int], name: str) -> Any:
    """A Gloo backend among some ranks of a group, all of which call this; others need not.

    It has the collectives of a group, but torch does not know it.
    """
    store = PrefixStore(f"paceline/{name}", group.get_group_store())
    # With those of the group: when they are shut, a wait in here ends as well.
    with CONNECTIONS.recorded(is_more=True):
        return gloo_like(group, store, ranks.index(group.rank()), len(ranks))


def have_left(group: Group, ranks: Sequence[int]) -> bool:
    """Whether any of the ranks has left word that it will not answer any more."""
    return any(words["kind"] != "waiting" for words in _read_last_words(group, ranks).values())


def refuse_lost(group: Group, what: str) -> None:
    """Raise if a rank is gone: what the device of this one then holds is not a sum.

    To be called before something that cannot be is blamed on what the ranks have sent.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    deadline_s = time.monotonic() + _LOST_S
    while time.monotonic() < deadline_s:
        words = _read_last_words(group, others).values()
        # Another rank that finds the same mismatch leaves because of it.
        has_left = any(
            each["kind"] != "waiting" and not each["text"].startswith("raised DesyncError")
            for each in words
        )
        if has_left or _device_waits.has_failed():
            raise explain_failure(group, what, RuntimeError("a rank is gone"))
        time.sleep(0.02)


def settle_device() -> None:
    """Wait until all sums on the device have arrived; an error if one cannot any more.

    To be called before this process ends with results, or says that it has ended.
    """
    _device_waits.settle()


def post_last_words(group: Group, text: str, kind: str = "left") -> None:
    """Leave word in the group's store of why this rank will not answer; never raises."""
    words = {"kind": kind, "text": text[:_WORDS_LIMIT_CHARS], "time": time.time()}
    try:
        group.get_group_store().set(_WORDS_KEY.format(rank=group.rank()), json.dumps(words))
    except Exception:
        return  # the store may be gone with the rank that served it


def explain_failure(group: Group, what: str, error: BaseException) -> PeerError:
    """Say which ranks are missing from a collective that failed on this one.

    A rank that has said nothing may be at work still, and notice later. So it is not called the
    one at fault, and not named at all where another has raised an error of its own.
    """
    rank, size = group.rank(), group.size()
    # Before others' words are read: of two that fail together each must see that the other waits.
    post_last_words(group, what, kind="waiting")
    others = [other for other in range(size) if other != rank]
    deadline = time.monotonic() + _words_patience_s[0]
    while len(said := _read_last_words(group, others)) < size - 1 and time.monotonic() < deadline:
        time.sleep(0.02)  # a moment for those still failing
    names = world_ranks(group)
    gone = [f"rank {names[r]} {w['text']}" for r, w in said.items() if w["kind"] != "waiting"]
    waiting = [names[r] for r, words in said.items() if words["kind"] == "waiting"]
    silent = [names[r] for r in others if r not in said]
    where = "; ".join(gone)
    if silent and not any(_is_cause(words) for words in said.values()):
        silence = f"no word yet from {name_ranks(silent)}: ended, stopped or still at work"
        where = f"{where}; {silence}" if where else silence
    if waiting and not where:
        where = f"{name_ranks(sorted([names[rank], *waiting]))} all lost a connection"
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    return PeerError(
        f"{what} failed on rank {names[rank]}, one of {size}: {_short(first_line)}.",
        f"{where[:1].upper()}{where[1:]}.",
        "Every rank must run the same backward passes: look for the first error on the rank "
        "named here, or for a branch that only some ranks take.",
    )


def has_aborted_device() -> bool:
    """Whether a sum on the device was aborted; torch would take a minute to end such a process."""
    return _device_waits.error is not None


def _has_any_left(group: Group) -> bool:
    return have_left(group, [rank for rank in range(group.size()) if rank != group.rank()])


_device_waits = DeviceWaits(_has_any_left, explain_failure)


def _is_cause(words: dict[str, Any]) -> bool:
    """Whether a rank failed by itself, and not because it missed another."""
    return words["kind"] == "raised" and not words["text"].startswith("raised PeerError")


def word_device(group: Group, device: torch.device) -> torch.device:
    """Where small messages of the group travel: on the host where it can, so that no device is
    waited for."""
    return torch.device("cpu") if has_cpu_backend(group) else device


def world_ranks(group: Group) -> list[int]:
    """The ranks of the group's members as the default group counts them."""
    try:
        return dist.get_process_group_ranks(group)
    except Exception:
        return list(range(group.size()))  # torch does not know the group: it is a world of its own


def _read_last_words(group: Group, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """What other ranks have left in the store; nothing where there is no store."""
    try:
        store = group.get_group_store()
        keys = {rank: _WORDS_KEY.format(rank=rank) for rank in ranks}
        return {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
    except Exception:
        return {}


def _short(line: str) -> str:
    """The first sentence of Gloo's message, without the path of its source file."""
    return re.sub(r"^\[[^\]]*\] ", "", line).split(". ", 1)[0].rstrip(".")
