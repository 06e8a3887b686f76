"""From "gradient ready" to averaged gradients, in the same order on every rank.

Autograd calls a hook when a parameter's gradient is complete. The reducer counts, starts each
bucket's sum as soon as the bucket is full, and waits for all of them when backward ends. The hooks
keep the reducer alive, so gradients stay synchronised even when the wrapper is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.ddp.alone import AVERAGING, LONER
from paceline.ddp.backward import Backward, BackwardFollower
from paceline.ddp.buffer import Bucket, ParamRef
from paceline.ddp.checks import ModelCheck
from paceline.ddp.hooks import Hook, HookCall
from paceline.ddp.layout import BucketLayout
from paceline.ddp.torch_compat import TorchReducer
from paceline.ddp.trailer import Agreement
from paceline.ddp.unbucketed import average_sparse, average_unfrozen
from paceline.errors import DesyncError, FitError, PacelineError, UsageError, name_ranks
from paceline.group import Membership, broadcast
from paceline.torch_private import accumulated_grad_hooks, keep_out_of_graphs
from paceline.transport import (
    Buckets,
    Reduction,
    SharedBuckets,
    SharedMemory,
    Transport,
    TransportChoice,
    place,
)

MODEL_CHECK_PERIOD = 64
"""Every so many steps the model is searched for parameters that no engine averages, unasked."""


class Reducer(BackwardFollower, TorchReducer):
    """Averages gradients over the group, bucket by bucket, while backward is still running.

        idle --(first hook)--> following a backward --(its end)--> averaged, idle

    Invariant: every rank starts its buckets in the same order, whatever order its gradients
    become ready in. Otherwise rank 0's bucket 1 would be summed with rank 1's bucket 2.
    Whatever else ranks must agree on in a step travels in the trailer of the last bucket.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, Parameter]],
        membership: Membership,
        transport: TransportChoice,
        *,
        capacities_bytes: Sequence[int] | None = None,
        sparse_names: frozenset[str] = frozenset(),
        always_views: bool = False,
    ) -> None:
        params = [ParamRef(name, param) for name, param in named_params]
        trained = {name for name, param in named_params if param.requires_grad}
        dense = [p for p in params if p.name in trained - sparse_names]
        super().__init__(BucketLayout(dense, capacities_bytes, always_views))
        self.membership = membership
        self.size = membership.size
        self._transport = transport
        self._places: Buckets | None = None
        """Where the buckets live; found when the first of a layout starts."""
        self.steps = 0
        """How many backward passes have been synchronised, or which step a run is at."""
        self.after_sync: Callable[[], Callable[[], None] | None] | None = None
        """Refers to what is called after every synchronised backward, at one point on all ranks."""
        self.check_model: ModelCheck | None = None
        self.is_joined = False
        """Whether ranks may run out of inputs: they do not update their copies then."""
        self._refs = params
        self.agreement = Agreement(membership, params)
        self._sparse_names = sparse_names
        self._sparse = [p for p in params if p.name in trained & sparse_names]
        self._frozen = [p for p in params if p.name not in trained]
        self.adopted: list[str] = []
        """Those that were frozen at first, in the order in which they were unfrozen."""
        self._hook: tuple[Hook, Any] | None = None
        self._order_is_agreed = False
        membership.follow(self.on_generation)

    def attach(self) -> None:
        """Hook every parameter; a reducer that averaged nothing but these lets go."""
        if self.arrivals.is_hooked:
            return
        params = self.parameters
        mine = set(map(id, params))
        for param in params:
            for hook in list((accumulated_grad_hooks(param) or {}).values()):
                owner = getattr(hook, "reducer", None)
                if isinstance(owner, Reducer) and mine.issuperset(map(id, owner.parameters)):
                    owner.detach()
        self.arrivals.hook(params, self._make_hook())

    def detach(self) -> None:
        """Let go of every parameter: their gradients are no longer synchronised here."""
        self.arrivals.unhook()

    def set_hook(self, hook: Hook, state: Any) -> None:
        """Reduce through this hook from now on."""
        self._hook = (hook, state)
        self._layout.trailer_apart = True
        self._lay_out()

    def align(self) -> None:
        """Let gradients lie in buckets as their parameters can, even where a hook sees them."""
        self._layout.is_aligned = True
        if self._hook is not None:
            self._lay_out()

    def take_over(self, before: Reducer) -> None:
        """Go on where another reducer of the same model stopped."""
        self.steps, self.backwards = before.steps, before.backwards
        self.wants_sync, self.agreement.compares = before.wants_sync, before.agreement.compares
        if before._hook is not None:
            self.set_hook(*before._hook)

    def on_generation(self) -> None:
        """Continue among the ranks of another group: sums, memory and order are found anew."""
        self.size = self.membership.size
        self.forget()  # an error of the old group may keep its backward alive until later
        self.agreement.on_generation()
        self._order_is_agreed = False
        self._layout.begin_anew()
        self._places = None
        if self.size > 1 or self._hook is not None:
            self.attach()
        else:
            self.detach()

    def _lay_out(self) -> None:
        """Make new buckets, and hook the parameters in them."""
        self._layout.lay_out()
        self._places = None
        self.detach()
        if self.size > 1 or self._hook is not None:
            self.attach()

    @property
    def has_hook(self) -> bool:
        return self._hook is not None

    @property
    def transport(self) -> Transport:
        """How this model's tensors travel; see `TransportChoice.get`."""
        return self._transport.get()

    def meet(self, what: str) -> None:
        """Wait for all ranks, where the transport can; raise if one has begun its next backward."""

        def look() -> None:
            if ahead := self._ahead():
                raise DesyncError(
                    f"{what} needs all ranks, but {name_ranks(ahead)} went on to the next step.",
                    advice="Call it on every rank, at the same point.",
                )

        if isinstance(self.transport, SharedMemory):
            self.transport.meet(what, look)

    def copy(self, flat: Tensor, root: int, what: str) -> None:
        """Overwrite a flat tensor with the root's; raise if that waits for this rank elsewhere."""
        ahead = [self._ahead] if isinstance(self.transport, SharedMemory) else []
        self.transport.copy(flat, root, what, *ahead)

    def _ahead(self) -> list[int]:
        """The ranks that wait in a backward pass which this one has not begun, where known."""
        return self._places.overtaking() if isinstance(self._places, SharedBuckets) else []

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._layout.buckets

    @property
    def parameters(self) -> list[Parameter]:
        """Every parameter it knows of, frozen ones included."""
        return [param for ref in self._refs if (param := ref.get()) is not None]

    def on_forward(self) -> None:
        """A forward pass begins."""
        self.check_not_interrupted()
        if self.current is None:  # else it is one inside a backward
            for bucket in self._layout.buckets:
                if bucket.plan.device.type != "cpu":
                    bucket.lend()

    def check_not_interrupted(self) -> None:
        """If the last backward broke off half-way on this rank, tell the others and raise."""
        if self.broken is not None:
            self._abandon(self.broken)

    def shadow(self, weight: float) -> None:
        """Take part in a backward of the others without gradients or weighted items of its own."""
        self.weight.set(0.0 if self.weight.was_used else weight)
        self._finish(Backward(skips=False, is_shadow=True))

    def take_part(self) -> None:
        """Take part in one backward of the others as if one's own had reached no parameter.

        Unlike a shadow this is a step of this rank's training, only without anything to add: it
        gets the others' average, under `weighted(0)` undiluted.
        """
        self.on_complete_backward(Backward(skips=False))

    def _make_hook(self) -> Callable[[Tensor], None]:
        """Notes that a gradient has come, and starts the buckets that are full by now."""
        reducer = self

        def on_grad_ready(param: Tensor) -> None:
            current = reducer.current or reducer.open(param)
            current.arrived.append(param)
            # A hook that was registered after ours has yet to change this gradient.
            *_, last = (accumulated_grad_hooks(param) or {}).values()
            if not current.skips and getattr(last, "reducer", None) is reducer:
                reducer._on_gradients(current)

        on_grad_ready.reducer = self  # type: ignore[attr-defined]
        keep_out_of_graphs(on_grad_ready)
        return on_grad_ready

    def on_untouched_backward(self) -> None:
        """Raise if that is because parameters were replaced after wrapping."""
        if self.check_model is not None:
            self.check_model(self.parameters)

    def on_complete_backward(self, ended: Backward) -> None:
        self._count(ended)
        if LONER.is_done:
            self._finish(ended)
            return
        with LONER.waits(self.membership, AVERAGING):
            self._finish(ended)

    def _count(self, current: Backward) -> None:
        """Take the gradients that have come since the last time off what buckets wait for.

        Mostly they are the same ones as in the last backward, and need not be counted again.
        """
        came, before = current.arrived[current.counted :], current.counted
        current.counted += len(came)
        layout, ids = self._layout, list(map(id, came))
        known = layout.counts.get(before)
        if known is None or known[0] != ids:
            if len(layout.counts) > 2 * len(layout.buckets):  # orders that change all the time
                layout.counts.clear()
            known = layout.counts[before] = ids, Counter(map(layout.bucket_by_id.get, ids))
        for bucket, times in known[1].items():
            if bucket is None or not current.missing:
                continue
            current.missing[bucket] -= times
            if bucket < len(current.in_flight):
                raise self._layout.late_gradient(
                    self.steps, self.membership.rank, came, len(current.in_flight)
                )

    def _on_gradients(self, current: Backward) -> None:
        """Start every full bucket whose predecessors have started.

        The last one waits for the end of backward, because its trailer speaks for all.
        """
        self._count(current)
        last = len(self._layout.buckets) - 1
        while len(current.in_flight) < last and current.missing[len(current.in_flight)] <= 0:
            self.refuse_second_average(current)
            self._start_next(current)

    def _start_next(self, current: Backward) -> None:
        places = self._places or self._place()
        number = len(current.in_flight)
        bucket = self._layout.buckets[number]
        current.unused += bucket.fill_zeros() if current.is_shadow else bucket.fill()
        if bucket.plan.trailer:
            self.agreement.write(
                self._layout.trailer,
                bucket.trailer,
                current,
                self.steps,
                self.weight,
                votes=bool(self._frozen) and any(ref.requires_grad for ref in self._frozen),
                is_joined=self.is_joined,
            )
        if self._hook is not None and current.in_flight and bucket.plan.device.type == "cpu":
            # Hooks may communicate again when their first sum has arrived. Gloo does that on two
            # threads in any order, so two buckets at once could block each other for good.
            current.in_flight[-1].wait()
        if self.observer is not None and self.observer.watch.records:
            self.observer.bucket_starts(number, current.in_flight, bucket.buffer)
        current.in_flight.append(self._start(number, bucket, places))

    def _start(self, number: int, bucket: Bucket, places: Buckets) -> Reduction:
        if self._hook is not None and bucket.plan.slots:
            # The last bucket of all has only the trailer, which no hook sees.
            return HookCall(*self._hook, bucket, number, last=len(self._layout.buckets) - 2)
        return places.start(number, bucket.buffer, self.weight.value, self._describe(number))

    def _place(self) -> Buckets:
        """Ask the transport where new buckets are to live; all ranks do so at the same point."""
        plans = [bucket.plan for bucket in self._layout.buckets]
        what = f"Step {self.steps}: finding memory for the buckets"
        found = place(self._transport.get(), plans, what)
        for bucket, home in zip(self._layout.buckets, found.homes, strict=True):
            bucket.use_memory(home)
            is_whole = self._hook is not None or found.divides(bucket.plan.dtype)
            bucket.scale = 1.0 if is_whole else 1.0 / self.size
        self._places = found
        return found

    def _finish(self, current: Backward) -> None:
        """Backward has ended: start what has not started, wait for all, hand out averages."""
        try:
            is_first = not self._layout.is_learned
            if is_first:
                ready = self._layout.indices(current.arrived)
                self._learn(ready)  # before anything is placed: memory is found only once
            if (self.weight.is_set or is_first) and not current.is_shadow:
                self._refuse_misuse(current)
            early = current.early = len(current.in_flight)
            if not is_first and early + 1 < len(current.missing) and current.missing[early] <= 0:
                # Full, and not started: another gradient than the awaited one came last.
                self._layout.expect(self._layout.indices(current.arrived))
            while len(current.in_flight) < len(self._layout.buckets):
                self._start_next(current)
            compares = False
            if self.observer is not None:
                compares = self.observer.wait_for(
                    current.in_flight, self._describe, is_shadow=current.is_shadow
                )
            else:
                for reduction in current.in_flight:
                    reduction.wait()
            self._settle(current)
        except FitError:
            if is_first:
                self.on_generation()  # what was learned is not how a whole backward goes
            raise
        finally:
            self.current = None
            self.weight.value = 1.0
            if not self.weight.is_clean:
                params = self.parameters if self.weight.is_set else ()
                self.weight.reset(params, current.arrived)
            self.steps += 1
        if self.observer is not None and compares:
            self.observer.step_ends()
        after_sync = self.after_sync() if self.after_sync is not None else None
        if after_sync is not None:
            after_sync()

    @torch.no_grad()
    def _settle(self, current: Backward) -> None:
        """Turn the sums in the buckets into averages, and those into gradients."""
        trailer = self._layout.buckets[-1].trailer
        words = self._layout.trailer.words(trailer)
        waits = bool(current.unused or self._frozen)
        factor, is_unfrozen = self.agreement.read(words, self.steps, waits=waits)
        is_applied = self._hook is None and self._places and self._places.applies_weights
        if not is_applied and (isinstance(factor, Tensor) or factor != 1.0):
            for bucket in self._layout.buckets:
                bucket.flat.mul_(factor)
        used = self._layout.trailer.used(trailer) if current.unused else []
        # A parameter that was replaced gets no gradient; one that was added was registered.
        is_due = max(current.missing, default=1) > 0 or self.steps % MODEL_CHECK_PERIOD == 0
        check = self.check_model
        if check is not None and (is_due or check.seen != check.registrations.total):
            check(self.parameters)
        if not current.is_shadow:
            for number, bucket in enumerate(self._layout.buckets):
                bucket.hand_out(used, is_untouched=number >= current.early)
        if is_unfrozen:
            self._adopt(factor)
        for ref in self._sparse:
            what = f"Step {self.steps}: the sum of the sparse gradient of {ref.name!r}"
            share = factor / self.size
            average_sparse(self.membership.group, ref, share, what, is_shadow=current.is_shadow)
        if current.aside:
            self.refuse_second_average(current)  # of other ranks, which had zeroed theirs
            current.put_back()

    def _adopt(self, factor: float | Tensor) -> None:
        """Average what the newly unfrozen parameters have, and follow them from now on."""
        newly = [ref for ref in self._frozen if ref.requires_grad]
        dense = [ref for ref in newly if ref.name not in self._sparse_names]
        device = self._layout.buckets[-1].plan.device
        average_unfrozen(self.membership.group, newly, dense, factor, device, self.steps)
        self._take_in(newly)

    def _take_in(self, newly: Sequence[ParamRef]) -> None:
        self.adopted += [ref.name for ref in newly]
        self._frozen = [ref for ref in self._frozen if ref.name not in self.adopted]
        self._sparse += [ref for ref in newly if ref.name in self._sparse_names]
        self._layout.add([ref for ref in newly if ref.name not in self._sparse_names])
        self._order_is_agreed = False
        self._lay_out()

    def adopt(self, names: Sequence[str]) -> None:
        """In a new generation: follow the parameters that other ranks do since they were unfrozen,
        in their order, and lay them out as they do."""
        ref_by_name = {ref.name: ref for ref in self._frozen}
        if newly := [ref_by_name[name] for name in names if name in ref_by_name]:
            self._take_in(newly)
            self._layout.begin_anew()
            self._lay_out()

    def _learn(self, ready: Sequence[int]) -> None:
        """Lay the buckets out once in the order in which gradients became ready on rank 0."""
        order = self._layout.learn(ready)
        if self.size > 1 and len(self._layout.buckets) > 1 and not self._order_is_agreed:
            agreed = torch.tensor(order, device=self._layout.buckets[-1].plan.device)
            transport, what = self._transport.get(), f"Step {self.steps}: ordering the buckets"
            if (meet := getattr(transport, "meet", None)) is not None:
                meet(what)  # notices a stopped rank, for which a broadcast waits
            broadcast(self.membership.group, agreed, 0, what)
            self._layout.messages_are_cheap = getattr(transport, "has_cheap_messages", False)
            if self._layout.lay_out(agreed.tolist()):
                self._places = None
        self._order_is_agreed = True

    def _abandon(self, broken: Backward) -> None:
        """Complete a backward that broke off here, so that the others can raise too."""
        self.broken = None
        self.weight.reset()
        if broken.skips or not broken.in_flight:
            return  # nothing was sent, so the others still wait for this rank's next backward
        was_complete = len(broken.in_flight) == len(self._layout.buckets)
        try:
            self._call_off(broken)
        finally:
            self.steps += 1
        fate = "have applied it" if was_complete else "were told to stop"
        raise DesyncError(
            f"Step {self.steps - 1}: the last backward on rank {self.membership.rank} ended before "
            f"its gradients were averaged; the other ranks {fate}.",
            advice="A backward that raised cannot be skipped on one rank alone: let the error end "
            "the program, or restore every rank to the same checkpoint.",
        )

    def _call_off(self, current: Backward) -> None:
        """Send what is left to send, and the word that it is worth nothing.

        Sums that have begun are waited for: their memory must not be used again before.
        """
        current.is_shadow = current.is_aborting = True
        while len(current.in_flight) < len(self._layout.buckets):
            self._start_next(current)
        for reduction in current.in_flight:
            reduction.wait()

    def _refuse_misuse(self, current: Backward) -> None:
        """Raise if weights or hooks were used wrongly here, after telling the others."""
        try:
            self._refuse_update(current)
            self.weight.refuse_misuse(self.steps, self.parameters)
            self.refuse_second_average(current)
        except UsageError:
            with suppress(PacelineError):  # the first error is the one to show
                self._call_off(current)
            raise

    def _refuse_update(self, current: Backward) -> None:
        """Raise if a hook of the caller's has updated parameters with gradients of this rank."""
        if current.versions and current.versions != (versions := self._layout.versions()):
            changed = zip(self._layout.params, current.versions, versions, strict=True)
            name = next(ref.name for ref, before, now in changed if before != now)
            raise UsageError(
                f"Parameter {name!r} was updated inside backward, before gradients are averaged.",
                advice="Call the optimizer's step() after backward instead.",
            )

    def refuse_second_average(self, current: Backward) -> None:
        if found := [param for param, _ in current.aside if param.grad is not None]:
            name = next(ref.name for ref in self._refs if ref.get() is found[0])
            raise UsageError(
                f"Step {self.steps}: weighted gradients of {name!r} would be added onto "
                "the averages of an earlier backward.",
                advice="Call zero_grad() first; to accumulate, put every backward but the last "
                "under no_sync().",
            )

    def _describe(self, number: int) -> str:
        first, *rest = self._layout.buckets[number].names or [""]
        inside = f" ({first!r} to {rest[-1]!r})" if rest else f" ({first!r})" if first else ""
        return f"Step {self.steps}: the sum of bucket {number}{inside}"


# Note [Who keeps whom alive]
# A parameter holds its hooks in C++, where Python's garbage collector cannot look. The hooks hold
# the reducer, so if the reducer held the parameters the circle would never be collected, and with
# it the process group and its sockets: a rank that fails could not even disconnect. So parameters
# keep the reducer alive, and the reducer refers to parameters weakly.
