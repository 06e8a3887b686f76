"""The update shared out: each rank steps its share of the parameters, and all gather the rest.

    gradients averaged --(each rank: the optimizer, on its own share)--> some new parameters
                       --(gathered)--> all of them, on every rank

Around the optimizer's `step()` the parameters in its groups are exchanged for this rank's share, so
that it keeps state for that alone.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline import comm
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError, PacelineError, UsageError
from paceline.gradients.reducer import Reducer
from paceline.update.exchange import ExchangedStep, States, find_exchanged
from paceline.update.kind import Kind, find_kind
from paceline.update.shares import ElementShares, FlatShares, TensorShares


def shard_update(model: nn.Module, optimizer: Optimizer) -> None:
    """Let every rank step its share of the parameters, and keep the optimizer's state for it alone.

        model = paceline.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters())
        paceline.shard_update(model, optimizer)

    The rest of a training loop stays as it is. Every rank calls `optimizer.step()` together with
    the others, and `optimizer.state_dict()`, which gives the state of whole parameters, too.
    Raises on every rank, and changes nothing, where the update cannot be shared out.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"shard_update() was given a {type(model).__name__}, which is not wrapped.",
            advice="Wrap it in paceline.DistributedDataParallel first, and pass the wrapper.",
        )
    reducer: Reducer = model._reducer
    problem, kind = None, Kind.ELEMENT
    try:
        _refuse_misuse(model, reducer, optimizer)
        kind = find_kind(optimizer)
    except PacelineError as error:
        problem = error
    if reducer.size > 1:
        _refuse_differences(model, optimizer, problem)
    elif problem is not None:
        raise problem
    reducer.align()
    _by_reducer[reducer] = weakref.ref(ShardedUpdate(reducer, optimizer, kind))


class ShardedUpdate(ExchangedStep):
    """Shares the steps of one optimizer out among the ranks that train one model.

    Invariant: outside of `step()` parameters are whole and equal on all ranks. Alone, or until the
    first step among others, the optimizer works as any other does.
    """

    def __init__(self, reducer: Reducer, optimizer: Optimizer, kind: Kind) -> None:
        super().__init__(optimizer)
        self.reducer = reducer
        self._make = ElementShares if kind is Kind.ELEMENT else TensorShares
        self._buckets: Any = None
        self._generation = -1

    def make_shares(self, states: States) -> FlatShares:
        """All ranks do so at one point."""
        self._buckets = self.reducer.buckets
        self._generation = self.reducer.membership.generation
        return self._make(self.reducer, self.optimizer, states)

    def is_current(self) -> bool:
        return self._buckets is self.reducer.buckets and super().is_current()

    def refuse(self) -> None:
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

    @property
    def is_idle(self) -> bool:
        return self.reducer.size == 1

    @property
    def is_whole(self) -> bool:
        return self._shares is None

    def make_whole(self) -> None:
        if self._shares is not None:
            whole = self.collect(self._shares)
            self._shares, self.optimizer.state = None, defaultdict(dict, whole)

    def forget(self) -> None:
        self.put_back()
        if self._shares is not None:
            self._shares, self.optimizer.state = None, defaultdict(dict)


_by_reducer: weakref.WeakKeyDictionary[Reducer, weakref.ref[ShardedUpdate]] = (
    weakref.WeakKeyDictionary()
)


def _refuse_misuse(model: DistributedDataParallel, reducer: Reducer, optimizer: Optimizer) -> None:
    """Raise if this rank's optimizer does not belong to this model, or it is too late."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"shard_update() was given a {type(optimizer).__name__} as optimizer.",
            advice="Pass an optimizer of torch's kind, which has hooks around its step.",
        )
    before = _by_reducer.get(reducer)
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
    known = {id(param): name for name, param in model.named_parameters()}
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    strange = [
        tuple(param.shape)
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) not in known
    ]
    if strange:
        raise UsageError(
            f"The optimizer has {len(strange)} parameters that are not the model's, the first of "
            f"shape {strange[0]}.",
            advice="Build the optimizer from the parameters of this very model.",
        )
    wanting = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if wanting:
        raise UsageError(
            f"The optimizer lacks {len(wanting)} of the model's parameters, the first of them "
            f"{wanting[0]!r}.",
            advice="Give all parameters that require gradients to one optimizer, in groups.",
        )


def _refuse_differences(
    model: DistributedDataParallel, optimizer: Any, problem: PacelineError | None
) -> None:
    """Raise on every rank if any has a problem, or another optimizer than rank 0."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [] if problem else optimizer.param_groups
    mine = {
        "problem": [problem.what, problem.advice] if problem else None,
        "type": type(optimizer).__name__,
        "groups": [[names.get(id(param), "") for param in group["params"]] for group in groups],
        "settings": [
            {key: repr(value) for key, value in group.items() if key != "params"}
            for group in groups
        ],
    }
    group = model.process_group
    device = comm.word_device(group, model.device)
    everyone = comm.exchange(group, mine, device, "Comparing the optimizers")
    if problem is not None:
        raise problem
    for rank, theirs in enumerate(everyone):
        if theirs["problem"]:
            what, advice = theirs["problem"]
            raise DesyncError(f"Rank {rank} cannot share its update out: {what}", advice=advice)
    for rank, theirs in enumerate(everyone):
        for key in ("type", "groups", "settings"):
            if theirs[key] != everyone[0][key]:
                raise DesyncError(
                    "The ranks have different optimizers.",
                    f"First difference: the {key} of rank 0 are {everyone[0][key]!r:.120}, those "
                    f"of rank {rank} {theirs[key]!r:.120}.",
                    "Build the same optimizer, with the same groups, on every rank.",
                )
