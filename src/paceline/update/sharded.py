"""The update shared out: each rank steps its share of the parameters, and all gather the rest.

    gradients averaged --(each rank: the optimizer, on its own share)--> some new parameters
                       --(gathered)--> all of them, on every rank

Around the optimizer's `step()` the parameters in its groups are exchanged for this rank's share, so
that it keeps state for that alone.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.ddp import DistributedDataParallel, Engine, OrderedEngine, SummedGradients
from paceline.errors import DesyncError, PacelineError, PeerError, UsageError, check_kind
from paceline.group import exchange, word_device
from paceline.torch_private import step_without_hooks
from paceline.transport import SharedMemory
from paceline.update.exchange import ExchangedStep, Shares, States, find_exchanged
from paceline.update.kept import can_be_kept, has_common_memory
from paceline.update.kept_shares import KeptShares
from paceline.update.kind import Kind, find_kind, params_of
from paceline.update.shares import ElementShares, FlatShares, Own, TensorShares
from paceline.update.whole import refuse_other_params

_Shareable = DistributedDataParallel | OrderedEngine
"""Engines whose gradients lie in buckets, alike on all ranks."""


def shard_update(
    model: nn.Module, optimizer: Optimizer, *, elementwise: bool | None = None
) -> None:
    """Let every rank step its share of the parameters, and keep the optimizer's state for it alone.

        model = paceline.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters())
        paceline.shard_update(model, optimizer)

    The rest of a training loop stays as it is. Every rank calls `optimizer.step()` together with
    the others, and `optimizer.state_dict()`, which gives the state of whole parameters, too.
    Raises on every rank, and changes nothing, where the update cannot be shared out.

    `elementwise` is your word on an optimizer that Paceline does not know: True if the step of an
    element depends on no other element, False if that of a parameter depends on no other parameter.
    """
    if not isinstance(model, _Shareable):
        raise UsageError(
            f"shard_update() was given a {type(model).__name__}, which is not wrapped.",
            advice="Wrap it in paceline.DistributedDataParallel first, and pass the wrapper.",
        )
    reducer = model.reducer
    problem, kind = None, Kind.ELEMENT
    try:
        _refuse_misuse(model, optimizer)
        kind = find_kind(optimizer, elementwise)
    except PacelineError as error:
        # Told to the others below, instead of leaving them to wait for this rank's word.
        problem = error
    if reducer.size > 1:
        _refuse_differences(model, optimizer, problem)
    elif problem is not None:
        raise problem
    reducer.align()
    # The optimizer keeps it alive by its hooks: it is gone as soon as the optimizer is.
    _sharded_updates[reducer] = weakref.ref(ShardedUpdate(reducer, optimizer, kind))


class ShardedUpdate(ExchangedStep):
    """Shares the steps of one optimizer out among the ranks that train one model.

    Invariant: outside of `step()` parameters are whole and equal on all ranks. Alone, or until the
    first step among others, the optimizer works as any other does.
    """

    def __init__(self, reducer: SummedGradients, optimizer: Optimizer, kind: Kind) -> None:
        super().__init__(optimizer)
        self.reducer = reducer
        self._kind = kind
        self._generation = -1

    def make_shares(self, states: States) -> FlatShares:
        """All ranks do so at one point."""
        self._generation = self.reducer.membership.generation
        if self._kind is Kind.TENSOR:
            return TensorShares(self.reducer, self.optimizer, states)
        is_kept = self.is_kept and can_be_kept(self.optimizer)
        make = KeptShares if is_kept else ElementShares
        return make(self.reducer, self.optimizer, states)

    def gather(self, shares: Shares) -> None:
        """If a rank dies in it, ranks that have come here finish the step without it."""
        try:
            shares.gather()
        except PeerError:
            if not self._rescue(self._step_pieces):
                raise

    def rescue(self) -> None:
        # The step may have been left between its hooks.
        self.put_back()
        self._rescue(None)

    def withdraw(self) -> None:
        if isinstance(self._shares, KeptShares):
            self._shares.withdraw()

    def _rescue(self, step: Callable[[list[Own], States], None] | None) -> bool:
        if not isinstance(self._shares, KeptShares):
            return False
        whole = self._shares.rescue(step)
        if whole is not None:
            self._shares, self.optimizer.state = None, defaultdict(dict, self.in_order(whole))
        return whole is not None

    def _step_pieces(self, own: list[Own], states: States) -> None:
        """Have the optimizer step these, and nothing else."""
        optimizer = self.optimizer
        outside = [group["params"] for group in optimizer.param_groups]
        state, optimizer.state = optimizer.state, states
        try:
            for number, group in enumerate(optimizer.param_groups):
                group["params"] = [each.tensor for each in own if each.group == number]
            step_without_hooks(optimizer)
        finally:
            optimizer.state = state
            for group, params in zip(optimizer.param_groups, outside, strict=True):
                group["params"] = params

    def basis(self) -> Any:
        return self.reducer.buckets, super().basis()

    def exchanges(self) -> bool:
        if self.reducer.is_joined:
            raise UsageError(
                "A rank that has run out of inputs does not step its share of the parameters.",
                advice="Do not use join() with an update that is shared out: give every rank as "
                "many batches.",
            )
        if self._shares is not None and self._generation != self.reducer.membership.generation:
            raise UsageError(
                "The ranks have changed, and the optimizer's state of those that left is gone.",
                advice="Begin again from a checkpoint, or do not share the update out.",
            )
        if self.reducer.size > 1 and not self.is_last_hook:
            raise UsageError(
                "A hook before the step was added to the optimizer after its update was shared "
                "out: it would see this rank's share of the gradients only.",
                advice="Call register_step_pre_hook() before shard_update().",
            )
        return self.reducer.size > 1

    @property
    def is_whole(self) -> bool:
        return self._shares is None


_sharded_updates: weakref.WeakKeyDictionary[SummedGradients, weakref.ref[ShardedUpdate]] = (
    weakref.WeakKeyDictionary()
)


def _refuse_misuse(model: _Shareable, optimizer: Optimizer) -> None:
    """Raise if this rank's optimizer does not belong to this model, or it is too late."""
    reducer = model.reducer
    check_kind(
        "optimizer", optimizer, Optimizer, "Pass one of torch's, with hooks around its step."
    )
    before = _sharded_updates.get(reducer)
    if find_exchanged(optimizer) is not None or (before is not None and before() is not None):
        raise UsageError(
            "The update of this model, or the work of this optimizer, is shared out already.",
            advice="Call shard_update() once, with the one optimizer of the model.",
        )
    if reducer.backwards:
        raise UsageError(
            "The model has been trained before its update was shared out.",
            advice="Call shard_update() right after wrapping, before the first backward.",
        )
    stepped = params_of(optimizer)
    refuse_other_params(model.parameters(), stepped)
    trained = set(map(id, stepped))
    wanting = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if wanting:
        raise UsageError(
            f"The optimizer lacks {len(wanting)} of the model's parameters, the first of them "
            f"{wanting[0]!r}.",
            advice="Give all parameters that require gradients to one optimizer, in groups.",
        )


def _refuse_differences(model: _Shareable, optimizer: Any, problem: PacelineError | None) -> None:
    """Raise on every rank if any has a problem, or another optimizer than rank 0."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [] if problem else optimizer.param_groups
    mine = {
        "type": type(optimizer).__name__,
        "groups": [[names.get(id(param), "") for param in group["params"]] for group in groups],
        "settings": [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in groups
        ],
    }
    group = model.reducer.membership.group
    device = word_device(group, next(model.parameters()).device)
    everyone = exchange(group, problem or mine, device, "Comparing the optimizers")
    for rank, theirs in enumerate(everyone):
        for key in ("type", "groups", "settings"):
            if theirs[key] != everyone[0][key]:
                raise DesyncError(
                    "The ranks have different optimizers.",
                    f"First difference: the {key} of rank 0 are {everyone[0][key]!r:.120}, those "
                    f"of rank {rank} {theirs[key]!r:.120}.",
                    "Build the same optimizer, with the same groups, on every rank.",
                )


WORTH_SHARING = 2**20
"""Parameters from which on the work that is saved exceeds what gathering costs; see decision 60."""


def is_worth_sharing(
    optimizer: Optimizer, *, size: int, can_survive: bool, elementwise: bool | None = None
) -> bool:
    """Whether `auto` shares the update of a run out; the same on every worker.

    It does so on CPUs, where it was measured, and where a run that can survive a worker loses
    nothing with it.
    """
    params = params_of(optimizer)
    if size == 1 or (can_survive and not can_be_kept(optimizer)):
        return False
    if any(param.device.type != "cpu" for param in params):
        return False
    if sum(param.numel() for param in params) < WORTH_SHARING:
        return False
    try:
        return find_kind(optimizer, elementwise) is Kind.ELEMENT
    except PacelineError:
        return False


def is_worth_gathering(model: Engine, *, can_survive: bool) -> bool:
    """Whether `auto` shares out: gathering through sockets takes longer than the update saves."""
    if not isinstance(model, _Shareable):
        return False
    transport = model.reducer.transport
    return has_common_memory(transport) if can_survive else isinstance(transport, SharedMemory)


def describe_sharing(
    model: Engine, optimizer: Optimizer, *, can_survive: bool, is_saved: bool
) -> list[str]:
    """What is said when a run begins."""
    assert isinstance(model, _Shareable)
    size = model.reducer.size
    if size == 1:
        return []
    line = (
        f"The update is shared out: each of {size} workers steps its share of the parameters, and "
        f"keeps the state of {type(optimizer).__name__} for it."
    )
    if can_survive and can_be_kept(optimizer) and has_common_memory(model.reducer.transport):
        line += " It lies in memory that all of them map: a worker that dies takes nothing along."
    elif can_survive and is_saved:
        line += (
            " A worker that dies takes its share along: the others go back to the newest "
            "checkpoint, of which checkpoint_every= makes more."
        )
    elif can_survive:
        line += (
            " A worker that dies takes its share along, and without a folder there is no "
            "checkpoint to go back to: its death ends the run."
        )
    return [line]
