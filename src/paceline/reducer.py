"""From "gradient ready" to averaged gradients, in the same order on every rank.

Autograd calls a hook when a parameter's gradient is complete. The reducer counts, starts each
bucket's sum as soon as the bucket is full, and waits for all of them when backward ends. The hooks
keep the reducer alive, so gradients stay synchronised even when the wrapper is dropped.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline import comm
from paceline.bucket_memory import Bucket, ParamRef
from paceline.buckets import Gradient, plan_buckets
from paceline.comm import Group
from paceline.comm_hook import Hook, HookCall
from paceline.errors import DesyncError, UsageError
from paceline.sparse import sum_sparse
from paceline.trailer import Trailer, Words

MODEL_CHECK_PERIOD = 25
"""Every so many steps the model is searched for parameters that nobody averages."""


class Reduction(Protocol):
    """A sum under way; `wait()` leaves the result in its bucket."""

    def wait(self) -> None: ...


@dataclass(slots=True, eq=False)
class Backward:
    """One backward pass as the reducer follows it."""

    skips: bool
    """Under `no_sync()`: gradients only accumulate."""
    missing: list[int]
    """By bucket, how many gradients have yet to come; never zero while the order is unknown."""
    callback: weakref.ref[Callable[[], None]] | None = None
    """What autograd calls at the end; the reference dies early when backward breaks off."""
    is_shadow: bool = False
    """This rank has run out of inputs and only keeps the others company."""
    is_aborting: bool = False
    ready: list[int] = field(default_factory=list)
    """Parameters in the order their gradients came."""
    in_flight: list[Reduction] = field(default_factory=list)
    """One entry for every bucket that has started, in order."""
    unused: list[int] = field(default_factory=list)


class Reducer:
    """Averages gradients over the group, bucket by bucket, while backward is still running.

        idle --(first hook)--> following a backward --(its end)--> averaged, idle

    Invariant: every rank starts its buckets in the same order, whatever order its gradients
    become ready in. Otherwise rank 0's bucket 1 would be summed with rank 1's bucket 2.
    Whatever else ranks must agree on in a step travels in the trailer of the last bucket.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        group: Group,
        *,
        capacities_bytes: Sequence[int],
        sparse_names: frozenset[str] = frozenset(),
        always_views: bool = False,
    ) -> None:
        self.group = group
        self.size: int = group.size()
        self.steps = 0
        """How many backward passes have been synchronised."""
        self.backwards = 0
        """How many backward passes have been followed, synchronised or not."""
        self.after_sync: Callable[[], None] | None = None
        """Called after every synchronised backward, at the same point on every rank."""
        self.wants_sync = True
        """What to do in a backward whose forward pass left no wish of its own."""
        self.unmarked_wish: bool | None = None
        """The wish of a forward pass whose outputs could not be marked with it."""
        self.check_model: Callable[[], None] | None = None
        """Raises if the model has parameters that this reducer does not know."""
        self.number = 0
        """The same on every rank, another for every model: see `_label`."""
        self._capacities_bytes = capacities_bytes
        self._always_views = always_views
        params = [ParamRef(name, param) for name, param in named_params]
        self._sparse = [p for p in params if p.name in sparse_names and p.requires_grad]
        self._params = [p for p in params if p.name not in sparse_names and p.requires_grad]
        self._frozen = [p for p in params if not p.requires_grad]
        self._order = list(reversed(range(len(self._params))))
        self._fires: Counter[int] | None = None
        """How often each gradient came in one backward; None until one has been seen."""
        self._hook: tuple[Hook, Any] | None = None
        self._handles: list[Any] = []
        self.weight: float | None = None
        """How many items the gradients are sums over; None where nobody said."""
        self.is_weighing = False
        """Whether this is inside a `weighted()` block."""
        self._has_unweighted = False
        self._is_weighted_run = False
        self._late_words: Tensor | None = None
        self._known_unused: set[int] = set()
        self._order_is_agreed = False
        self._announced: Backward | None = None
        """One that has reached an output of the model, but no parameter yet."""
        self._backward: Backward | None = None
        """The one that is running."""
        self._broken: Backward | None = None
        """One that broke off before its gradients were averaged."""
        self._rebuild()

    def attach(self) -> None:
        """Hook every parameter; a reducer that averaged nothing but these lets go."""
        if self._handles:
            return
        mine = {id(param) for param in self.parameters}
        for param in self._alive([*self._params, *self._sparse]):
            for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                owner = getattr(hook, "reducer", None)
                if isinstance(owner, Reducer) and mine.issuperset(map(id, owner.parameters)):
                    owner.detach()
        last = len(self._buckets) - 1
        for index, ref in enumerate(self._params):
            if self._fires is None or self._bucket_of[index] != last:
                self._attach_counted(index, ref)
            else:
                self._attach_uncounted(ref)
        for ref in self._sparse:
            self._attach_uncounted(ref)

    def detach(self) -> None:
        """Let go of every parameter: their gradients are no longer synchronised here."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def set_hook(self, hook: Hook, state: Any) -> None:
        """Reduce through the caller's hook from now on."""
        self._hook = (hook, state)
        self._rebuild()
        self.attach()

    def take_over(self, before: Reducer) -> None:
        """Go on where another reducer of the same model stopped."""
        self.steps, self.backwards = before.steps, before.backwards
        self.wants_sync = before.wants_sync
        if before._hook is not None:
            self.set_hook(*before._hook)

    def prepare_for_backward(self, _outputs: object = ()) -> None:
        """Nothing to do; libraries call it on torch's reducer."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    @property
    def parameters(self) -> Iterable[Parameter]:
        """Every parameter it knows of, frozen ones included."""
        return self._alive([*self._params, *self._sparse, *self._frozen])

    def _alive(self, refs: Sequence[ParamRef]) -> Iterator[Parameter]:
        return (param for param in (ref.get() for ref in refs) if param is not None)

    def on_output_grad(self, wants_sync: bool) -> None:
        """An output of a forward pass received its gradient: a backward runs, and this is its
        outermost call. Whether it reaches a parameter remains to be seen."""
        current = self._backward or self._announced
        if current is None:
            self._announced = self._follow(wants_sync, _queue_callback)
        elif wants_sync:
            # Several forwards in one backward: one wish to synchronise is enough. Gradients that
            # came while skipping were not counted; their buckets start at the end of backward.
            current.skips = False

    def check_not_interrupted(self) -> None:
        """If the last backward broke off half-way on this rank, tell the others and raise."""
        if self._broken is not None:
            self._abandon(self._broken)

    def shadow(self, weight: float) -> None:
        """Take part in one backward of the others without gradients of one's own.

        Where losses are weighted, a rank without inputs has no items.
        """
        self.weight = 0.0 if self._is_weighted_run else weight
        self._finish(Backward(False, [], is_shadow=True))

    def _attach_counted(self, index: int, ref: ParamRef) -> None:
        """Count this gradient for its bucket."""
        reducer = self

        def on_grad_ready(_param: Tensor) -> None:
            current = reducer._backward
            if current is None:
                current = reducer._open()
            current.ready.append(index)
            bucket = reducer._bucket_of[index]
            missing = current.missing
            left = missing[bucket] = missing[bucket] - 1
            if left <= 0:
                reducer._on_bucket_full(current, bucket, index)

        self._hook_up(ref, on_grad_ready)

    def _attach_uncounted(self, ref: ParamRef) -> None:
        """Only notice that a backward is running; this gradient waits for its end anyway."""
        reducer = self

        def on_grad_ready(_param: Tensor) -> None:
            if reducer._backward is None:
                reducer._open()

        self._hook_up(ref, on_grad_ready)

    def _hook_up(self, ref: ParamRef, hook: Callable[[Tensor], None]) -> None:
        param = ref.get()
        if param is not None and param.requires_grad:
            hook.reducer = self  # type: ignore[attr-defined]
            handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    def _open(self) -> Backward:
        """A backward has reached the first parameter."""
        self.check_not_interrupted()
        opened = self._announced
        if opened is None:
            wish = self.wants_sync if self.unmarked_wish is None else self.unmarked_wish
            opened = self._follow(wish, _at_end_of_outermost_backward())
        self._announced = None
        self._backward = opened
        self.backwards += 1
        return opened

    def _follow(self, wants_sync: bool, queue: Callable[[Callable[[], None]], None]) -> Backward:
        """Begin to follow a backward pass, and ask autograd to say when it ends."""
        # While skipping no bucket is ever full, so the hooks need not ask.
        missing = self._missing.copy() if wants_sync else self._never_full()
        followed = Backward(not wants_sync, missing)

        def at_end() -> None:
            self._on_backward_ended(followed)

        # Autograd alone owns `at_end`: it is freed when backward ends, however that may be.
        followed.callback = weakref.ref(at_end, self._on_callback_freed)
        queue(at_end)
        return followed

    def _on_backward_ended(self, ended: Backward) -> None:
        self.unmarked_wish = None
        if self._announced is ended:
            self._announced = None
            if not any(ref.requires_grad and ref.has_grad for ref in self._frozen):
                return  # it went through the model to its inputs, and concerns nobody else
            self._backward = ended  # only parameters that were frozen until now had gradients
        if self._backward is not ended:
            return
        if ended.skips:
            self._backward = None
            self._has_unweighted |= not self.is_weighing
        else:
            self._finish(ended)

    def _on_callback_freed(self, callback: weakref.ref[Callable[[], None]]) -> None:
        """If backward is still thought to be running, it has broken off."""
        if self._announced is not None and self._announced.callback is callback:
            self._announced = None
        if self._backward is not None and self._backward.callback is callback:
            self._backward, self._broken = None, self._backward

    def _on_bucket_full(self, current: Backward, bucket: int, param: int) -> None:
        """Start every full bucket whose predecessors have started.

        The last one waits for the end of backward, because its trailer speaks for all.
        """
        if bucket < len(current.in_flight):
            raise self._late_gradient(param)
        last = len(self._buckets) - 1
        while len(current.in_flight) < last and current.missing[len(current.in_flight)] <= 0:
            self._start_next(current)

    def _start_next(self, current: Backward) -> None:
        number = len(current.in_flight)
        bucket = self._buckets[number]
        if current.is_shadow:
            current.unused += bucket.fill_zeros()
        else:
            self._refuse_second_average(bucket)
            current.unused += bucket.fill(1.0 if self._hook else 1.0 / self.size)
        if bucket.plan.trailer:
            self._trailer.write(bucket.trailer, current.unused, self._words(current))
        if self._hook is not None and current.in_flight and bucket.plan.device.type == "cpu":
            # Hooks may communicate again when their first sum has arrived. Gloo does that on two
            # threads in any order, so two buckets at once could block each other for good.
            current.in_flight[-1].wait()
        current.in_flight.append(self._start(number, bucket))

    def _start(self, number: int, bucket: Bucket) -> Reduction:
        if self._hook is not None and bucket.plan.slots:
            return HookCall(*self._hook, bucket, number, last=len(self._buckets) - 2)
        if self.size == 1:
            return _ALONE
        return comm.start_all_reduce(self.group, bucket.buffer, self._describe(number))

    def _words(self, current: Backward) -> Words:
        return Words(
            weight=1.0 if self.weight is None else self.weight,
            votes=float(any(ref.requires_grad for ref in self._frozen)),
            aborts=float(current.is_aborting),
            label=self._label(),
        )

    def _label(self) -> float:
        """Which model and which step this is, as a number small enough to be summed exactly."""
        return float(1 + self.number % 64 * 64 + self.steps % 64)

    def _finish(self, current: Backward) -> None:
        """Backward has ended: start what has not started, wait for all, hand out averages."""
        try:
            self._refuse_mixed_weights(current)
            while len(current.in_flight) < len(self._buckets):
                self._start_next(current)
            for reduction in current.in_flight:
                reduction.wait()
            self._settle(current)
        finally:
            self._backward = None
            self._is_weighted_run |= self.is_weighing
            self.weight = None
            self._has_unweighted = False
            self.steps += 1
        if self._fires is None:
            self._learn_order(current.ready)
        if self.after_sync is not None:
            self.after_sync()

    @torch.no_grad()
    def _settle(self, current: Backward) -> None:
        """Turn the sums in the buckets into averages, and those into gradients."""
        trailer = self._buckets[-1].trailer
        words = self._trailer.words(trailer)
        votes = 0.0
        factor: float | Tensor
        if trailer.is_cuda and not current.unused and not self._frozen:
            # Nothing here needs the host to know, so the host does not wait for the device.
            self._check_late_words(words)
            factor = self.size / words[0]
        else:
            total, votes, aborts, labels = words.tolist()
            self._refuse_aborted(aborts)
            self._refuse_other_labels(labels)
            factor = self.size / total if total else 0.0
        if isinstance(factor, Tensor) or factor != 1.0:
            for bucket in self._buckets:
                bucket.flat.mul_(factor)
        used = self._trailer.used(trailer) if current.unused else []
        if self.check_model is not None and self._is_time_to_check(current):
            self.check_model()
        if not current.is_shadow:
            for bucket in self._buckets:
                bucket.hand_out(used)
                if self.weight is not None:
                    bucket.remember_averages()
        self._share_sparse(current, factor)
        if votes:
            self._adopt(factor)
        for bucket in self._buckets:
            if bucket.plan.device.type != "cpu":
                bucket.release()

    def _is_time_to_check(self, current: Backward) -> bool:
        """A parameter that was replaced stops having gradients; one that was added only shows
        in the model itself."""
        has_new_unused = not self._known_unused.issuperset(current.unused)
        self._known_unused.update(current.unused)
        return has_new_unused or self.steps < 2 or self.steps % MODEL_CHECK_PERIOD == 0

    def _share_sparse(self, current: Backward, factor: float | Tensor) -> None:
        for ref in self._sparse:
            param = ref.get()
            if param is None:
                raise DesyncError(
                    f"Parameter {ref.name!r} was removed after the model was wrapped.",
                    advice="Change the model first, then wrap it.",
                )
            grad = None if current.is_shadow else param.grad
            what = f"Step {self.steps}: the sum of the sparse gradient of {ref.name!r}"
            total, is_used = sum_sparse(self.group, grad, param, what)
            if is_used and not current.is_shadow:
                param.grad = total * (factor / self.size)

    def _adopt(self, factor: float | Tensor) -> None:
        """Average what the newly unfrozen parameters have, and follow them from now on."""
        newly = [ref for ref in self._frozen if ref.requires_grad]
        device = self._buckets[-1].plan.device
        names = comm.exchange(self.group, [ref.name for ref in newly], device, "Unfreezing")
        for rank, theirs in enumerate(names):
            if theirs != names[0]:
                odd = sorted(set(theirs) ^ set(names[0]))[0]
                one, other = (0, rank) if odd in names[0] else (rank, 0)
                raise DesyncError(
                    f"Step {self.steps}: {odd!r} requires grad on rank {one} "
                    f"but not on rank {other}.",
                    advice="Freeze and unfreeze the same parameters on every rank.",
                )
        for ref in newly:
            self._average_alone(ref, factor)
        known = len(self._params)
        self._params += newly
        self._frozen = [ref for ref in self._frozen if not ref.requires_grad]
        self._order += reversed(range(known, len(self._params)))
        self._fires = None
        self._order_is_agreed = False
        self._rebuild()
        self.detach()
        self.attach()

    def _average_alone(self, ref: ParamRef, factor: float | Tensor) -> None:
        param = ref.get()
        assert param is not None  # it required a gradient a moment ago
        flat = torch.zeros(param.numel() + 1, dtype=param.dtype, device=param.device)
        if param.grad is not None:
            flat[:-1] = param.grad.reshape(-1) / self.size
            flat[-1] = 1
        comm.all_reduce(
            self.group, flat, f"Step {self.steps}: the sum of the gradient of {ref.name!r}"
        )
        if flat[-1] != 0:
            param.grad = (flat[:-1] * factor).view(param.shape)

    def _learn_order(self, ready: Sequence[int]) -> None:
        """Re-plan once, in the order in which gradients really became ready on rank 0."""
        self._fires = Counter(ready)
        if self.size > 1 and len(self._buckets) > 1 and not self._order_is_agreed:
            # A gradient is complete when it comes for the last time; those that never came go last.
            seen = list(dict.fromkeys(reversed(ready)))[::-1]
            order = seen + [index for index in self._order if index not in self._fires]
            agreed = torch.tensor(order, device=self._buckets[-1].plan.device)
            comm.broadcast(self.group, agreed, 0, "Agreeing on the order of the buckets")
            self._order = agreed.tolist()
            self._rebuild()
        self._order_is_agreed = True
        self._count_missing()
        self.detach()
        self.attach()

    def _rebuild(self) -> None:
        """Lay the buckets out anew."""
        gradients = [
            Gradient(p.numel(), p.dtype, p.device) if p is not None else _NO_GRADIENT
            for p in (ref.get() for ref in self._params)
        ]
        plans = plan_buckets(
            gradients, self._order, self._capacities_bytes, trailer_apart=self._hook is not None
        )
        self._buckets = [Bucket(plan, self._params, self._always_views) for plan in plans]
        self._trailer = Trailer(len(gradients), plans[-1].dtype, plans[-1].device)
        self._bucket_of = [0] * len(gradients)
        for number, bucket in enumerate(self._buckets):
            for index in bucket.indices:
                self._bucket_of[index] = number
        self._count_missing()

    def _count_missing(self) -> None:
        """How many gradients each bucket waits for: more than ever come while that is unknown."""
        fires = self._fires
        if fires is None:
            self._missing = self._never_full()
        else:
            self._missing = [sum(max(1, fires[i]) for i in b.indices) for b in self._buckets]

    def _never_full(self) -> list[int]:
        return [sys.maxsize] * len(self._buckets)

    def _abandon(self, broken: Backward) -> None:
        """Complete a backward that broke off here, so that the others can raise too."""
        self._broken = None
        self.weight = None
        if broken.skips or not broken.in_flight:
            return  # nothing was sent, so the others still wait for this rank's next backward
        was_complete = len(broken.in_flight) == len(self._buckets)
        broken.is_shadow = broken.is_aborting = True
        try:
            while len(broken.in_flight) < len(self._buckets):
                self._start_next(broken)
            for reduction in broken.in_flight:
                reduction.wait()
        finally:
            self.steps += 1
        fate = "have applied it" if was_complete else "were told to stop"
        raise DesyncError(
            f"Step {self.steps - 1}: the last backward on rank {self.group.rank()} ended before "
            f"its gradients were averaged; the other ranks {fate}.",
            advice="A backward that raised cannot be skipped on one rank alone: let the error end "
            "the program, or restore every rank to the same checkpoint.",
        )

    def _refuse_aborted(self, aborts: float) -> None:
        if aborts:
            raise DesyncError(
                f"Step {self.steps}: {aborts:.0f} of {self.size} ranks broke off their backward.",
                advice="Look for the first error on the other ranks.",
            )

    def _refuse_other_labels(self, labels: float) -> None:
        if labels != self._label() * self.size:
            raise DesyncError(
                f"Step {self.steps}: rank {self.group.rank()} averaged gradients with ranks that "
                "were at another step or at another model.",
                advice="Run the backward passes of all models in the same order on every rank, "
                "and as many of them.",
            )

    def _check_late_words(self, words: Tensor) -> None:
        """Look at last step's words, which have reached the host by now, and send for these."""
        if self._late_words is not None:
            self._refuse_aborted(self._late_words[2].item())  # labels were already another step's
        self._late_words = words.to("cpu", non_blocking=True)

    def _refuse_second_average(self, bucket: Bucket) -> None:
        if self.weight is not None and bucket.is_average_added_to():
            raise UsageError(
                f"Step {self.steps}: weighted gradients of {bucket.names[0]!r} would be added onto "
                "the averages of an earlier backward.",
                advice="Call zero_grad() first; to accumulate, put every backward but the last "
                "under no_sync().",
            )

    def _refuse_mixed_weights(self, current: Backward) -> None:
        if current.is_shadow or self.weight is None:
            return
        if self._has_unweighted or not self.is_weighing:
            raise UsageError(
                f"Step {self.steps}: some of the accumulated backward passes had a weight and "
                "some had none, so their sum means nothing.",
                advice="Put every micro-batch of a step into a weighted() block, or none.",
            )

    def _late_gradient(self, index: int) -> DesyncError:
        """A gradient came once more often than in the backward the buckets were planned from."""
        self._fires = None  # the next backward waits for its end, and is learned from again
        self._count_missing()
        return DesyncError(
            f"Step {self.steps}: the gradient of {self._params[index].name!r} came again after its "
            f"bucket had been sent from rank {self.group.rank()}.",
            advice="The layer is checkpointed more often than in the first step: pass "
            "use_reentrant=False to torch.utils.checkpoint.",
        )

    def _describe(self, number: int) -> str:
        names = self._buckets[number].names
        ends = dict.fromkeys(repr(name) for name in (*names[:1], *names[-1:]))
        inside = f" ({' to '.join(ends)})" if ends else ""
        return f"Step {self.steps}: the sum of bucket {number}{inside}"


class _Alone:
    """The reduction in a world of one: there is nothing to wait for."""

    def wait(self) -> None:
        return


_ALONE = _Alone()
_NO_GRADIENT = Gradient(0, torch.float32, torch.device("cpu"))


def _queue_callback(callback: Callable[[], None]) -> None:
    """Have autograd call at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _at_end_of_outermost_backward() -> Callable[[Callable[[], None]], None]:
    """How to be called at the end of the outermost backward.

    A reentrant checkpoint runs a backward of its own inside a node of the real one. Autograd only
    takes callbacks for the inner one here, so the outer node is asked to queue it when it is done.
    """
    node = _outermost_node()
    if node is None:
        return _queue_callback

    def queue_later(callback: Callable[[], None]) -> None:
        node.register_hook(lambda *_: _queue_callback(callback))

    return queue_later


def _outermost_node() -> torch.autograd.graph.Node | None:
    """The node of the outermost backward from which Python code started this one, if any."""
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "backward":
            node = frame.f_locals.get("ctx")
            if isinstance(node, torch.autograd.graph.Node):
                found = node
        frame = frame.f_back
    return found


# Note [Who keeps whom alive]
# A parameter holds its hooks in C++, where Python's garbage collector cannot look. The hooks hold
# the reducer, so if the reducer held the parameters the circle would never be collected, and with
# it the process group and its sockets: a rank that fails could not even disconnect. So parameters
# keep the reducer alive, and the reducer refers to parameters weakly.
