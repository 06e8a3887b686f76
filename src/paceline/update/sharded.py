"""The update shared out: each rank steps its share of the parameters, and all gather the rest.

    gradients averaged --(each rank: the optimizer, on its own share)--> some new parameters
                       --(gathered)--> all of them, on every rank

The optimizer stays the object that it was. Around its `step()` the parameters in its groups are
exchanged for this rank's share, so it keeps state for that alone. What it saves and loads is the
state of whole parameters.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline import comm
from paceline.ddp import DistributedDataParallel
from paceline.errors import DesyncError, PacelineError, UsageError
from paceline.gradients.reducer import Reducer
from paceline.update.kind import Kind, find_kind
from paceline.update.shares import ElementShares, Shares, TensorShares


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
    if reducer.size > 1:
        reducer.align()
        _sharded[optimizer] = ShardedUpdate(reducer, optimizer, kind)


def find_sharded(optimizer: Optimizer) -> ShardedUpdate | None:
    """What shares the steps of this optimizer out, if anything does."""
    return _sharded.get(optimizer)


class ShardedUpdate:
    """Shares the steps of one optimizer out among the ranks that train one model.

        step() is called --> the share in the groups --> stepped --> gathered, all put back

    Invariant: outside of `step()` parameters are whole and equal on all ranks, and the groups
    hold what the caller has put there.
    """

    def __init__(self, reducer: Reducer, optimizer: Optimizer, kind: Kind) -> None:
        self._reducer, self._kind = reducer, kind
        self._get = weakref.ref(optimizer)
        self._shares: Shares | None = None
        self._made_for: tuple[Any, ...] = ()
        """What the shares depend on."""
        self._generation = reducer.membership.generation
        self._has_stepped = False
        self._outside: list[list[Parameter]] | None = None
        """What the groups hold outside of a step; None while they do."""
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(self._before_saving)
        optimizer.register_state_dict_post_hook(self._after_saving)
        optimizer.register_load_state_dict_pre_hook(self._before_loading)
        optimizer.register_load_state_dict_post_hook(self._after_loading)

    @property
    def _optimizer(self) -> Any:
        optimizer = self._get()
        assert optimizer is not None  # its hooks are what calls this
        return optimizer

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.put_back()
        self._refuse_now()
        args, kwargs = _without_closure(args, kwargs)
        shares = self._make_shares()
        shares.begin()
        groups = self._optimizer.param_groups
        self._outside = [group["params"] for group in groups]
        for number, group in enumerate(groups):
            group["params"] = shares.tensors(number, group["params"])
        return args, kwargs

    def _after_step(self, *_: Any) -> None:
        self.put_back()
        shares = self._shares
        assert shares is not None  # made before the step
        if not self._has_stepped:
            shares.describe(self._optimizer.state)  # raises where it cannot be put together again
            self._has_stepped = True
        shares.gather()

    def put_back(self) -> None:
        """Give the groups their parameters back; also after a step that has failed."""
        if self._outside is not None and self._shares is not None:
            for group, params in zip(self._optimizer.param_groups, self._outside, strict=True):
                group["params"] = params
            self._outside = None
            self._shares.drop_grads()
        if self._shares is not None:
            self._optimizer.state = self._shares.states

    def _make_shares(self) -> Shares:
        """Those of the buckets and groups that there are now; made by all ranks at one point."""
        groups = [tuple(map(id, group["params"])) for group in self._optimizer.param_groups]
        buckets, states = self._reducer.buckets, self._optimizer.state
        if self._shares is not None:
            if self._made_for[0] is buckets and self._made_for[1] == groups:
                return self._shares
            states = self._shares.collect(states)
        make = ElementShares if self._kind is Kind.ELEMENT else TensorShares
        self._shares = make(self._reducer, self._optimizer, states)
        self._made_for = buckets, groups
        self._optimizer.state = self._shares.states
        return self._shares

    def _refuse_now(self) -> None:
        if self._reducer.is_joined:
            raise UsageError(
                "A rank that has run out of inputs does not step its share of the parameters.",
                advice="Do not use join() with an update that is shared out: give every rank as "
                "many batches.",
            )
        if self._generation != self._reducer.membership.generation:
            raise UsageError(
                "The ranks have changed, and the optimizer's state of those that left is gone.",
                advice="Begin again from a checkpoint, or do not share the update out.",
            )

    def _before_saving(self, _: Any) -> None:
        self.put_back()
        if self._shares is not None:
            self._optimizer.state = self._shares.collect(self._shares.states)

    def _after_saving(self, *_: Any) -> None:
        self.put_back()

    def take_part_in_saving(self) -> None:
        """Help other ranks that call `optimizer.state_dict()`, without the memory for all of it."""
        if self._shares is not None:
            self._shares.collect(self._shares.states, keeps=False)

    def _before_loading(self, *_: Any) -> None:
        self.put_back()

    def _after_loading(self, _: Any) -> None:
        """What was loaded is the state of whole parameters."""
        if self._shares is not None:
            self._shares.adopt(self._optimizer.state)
            self._optimizer.state = self._shares.states


_sharded: weakref.WeakKeyDictionary[Optimizer, ShardedUpdate] = weakref.WeakKeyDictionary()


def _without_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the closure now, while the groups hold parameters, and pass on what it returned."""
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {**kwargs, "closure": lambda: loss}


def _refuse_misuse(model: DistributedDataParallel, reducer: Reducer, optimizer: Optimizer) -> None:
    """Raise if this rank's optimizer does not belong to this model, or it is too late."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"shard_update() was given a {type(optimizer).__name__} as optimizer.",
            advice="Pass an optimizer of torch's kind, which has hooks around its step.",
        )
    if optimizer in _sharded or any(each._reducer is reducer for each in _sharded.values()):
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
