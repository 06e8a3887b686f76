"""DistributedDataParallel: one process per device, gradients averaged after every backward.

The class is thin. It checks and copies the model when it is wrapped, looks after buffers in
the forward pass, and leaves gradients to the `Reducer`, whose hooks do their work whether or not
a forward pass went through the wrapper.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from paceline.ddp import checks, compress
from paceline.ddp.alone import LONER, WRAPPING
from paceline.ddp.backward import refuse_distributed_autograd
from paceline.ddp.fingerprint import DATASET_STEP
from paceline.ddp.hooks import Hook, check_hook
from paceline.ddp.options import (
    DEFAULT_OPTIONS,
    DDPOptions,
    bucket_capacities,
    check_arguments,
    pick_membership,
)
from paceline.ddp.reducer import Reducer
from paceline.ddp.torch_compat import (
    JoinSurface,
    LowPrecision,
    TorchSurface,
    agree_on_root,
    any_wants_sync,
)
from paceline.ddp.wrapper import Wrapper, named_buffers, named_parameters, sparse_names
from paceline.errors import DesyncError, HookError
from paceline.group import Membership, announce_exit, default_group, find_tensors, map_tensors
from paceline.telemetry import Observer, Phase, begin_observing
from paceline.torch_private import has_rpc_agent, outside_graphs
from paceline.transport import TransportChoice, check_transport, describe

BUFFERS_APPEAR_STEPS = 3
"""A model without buffers when it is wrapped is searched for some in its first steps."""


class DistributedDataParallel(TorchSurface, Wrapper, JoinSurface):
    """Keeps one model equal on all ranks by averaging its gradients after every backward.

    Takes torch's arguments. These have nothing left to do and are accepted without effect:
    `find_unused_parameters`, `static_graph`, `skip_all_reduce_unused_params` (any parameter may be
    used or not, on any rank, at any step), `batched_grad_copy` (always), `lazy_bucket_allocation`
    (on GPUs buckets have no memory in a forward pass), `check_reduction`, and
    `delay_all_reduce_named_params` with `param_to_hook_all_reduce` (averaged with the rest).
    `gradient_as_bucket_view` chooses only whether a gradient tensor that other code
    refers to may be replaced too; see `ddp.buffer`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        options: DDPOptions = DEFAULT_OPTIONS,
    ) -> None:
        check_arguments(module, delay_all_reduce_named_params, param_to_hook_all_reduce, options)
        capacities = bucket_capacities(bucket_cap_mb, bucket_cap_mb_list)
        membership = pick_membership(process_group, device_mesh)
        group = membership.group
        named = named_parameters(module)
        buffers = named_buffers(module)
        problem = checks.find_problem(named, buffers, device_ids, output_device)
        device = named[0][1].device if named else torch.device("cpu")
        # torch's newer argument speaks of forward passes only; the older one of wrapping as well.
        sync_buffers_now = forward_sync_buffers is not None or broadcast_buffers is not False
        identity = 0
        observer = begin_observing(membership, device)  # who is missing below is named
        if init_sync and group.size() > 1:
            compared = buffers if sync_buffers_now else []
            description = [] if problem else checks.describe(named, compared)
            transport = "" if isinstance(options.transport, str) else describe(options.transport)
            engine = [device.type, capacities, str(options.compression), transport]
            with LONER.waits(membership, WRAPPING):
                identity = checks.verify_same_model(group, description, device, problem, engine)
        elif problem is not None:
            raise problem

        nn.Module.__init__(self)
        JoinSurface.__init__(self)
        # Set before `module`: from then on, names that the module has are set on the module.
        self.membership = membership
        self.device = device
        self.device_type = device.type
        self.device_ids = [device.index] if device_ids else None
        self.output_device = device.index if device_ids else None
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = (
            broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        )
        self._ddp_options = options
        self._bucket_capacities = capacities
        self._identity = identity
        self.device_mesh = device_mesh
        self._low_precision = LowPrecision(mixed_precision, module) if mixed_precision else None
        self._has_buffers = False
        self._syncs_buffers_next = True
        self._backwards_before = -1
        self.module = module
        self._build_transport()
        self._build_reducer(named, observer=observer)
        if init_sync and group.size() > 1:
            tensors = [tensor for _, tensor in (*named, *(buffers if sync_buffers_now else []))]
            self._copy_from(0, tensors, "Copying rank 0's model")
        else:
            # Otherwise the copy has chosen the transport, which all ranks do at one point.
            self._transport.get()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; on several ranks also bring its buffers up to date first."""
        module: Any = self._modules["module"]
        if self._is_plain:  # a world of one must cost what the bare model costs
            return module(*inputs, **kwargs)
        is_followed = not self._is_alone or self._reducer.observer is not None
        if is_followed:
            self._before_forward((inputs, kwargs))
        if self.device_ids:
            move = lambda tensor: tensor.to(self.device, non_blocking=True)  # noqa: E731
            inputs, kwargs = map_tensors(move, (inputs, kwargs))
        if self._low_precision is not None:
            output = self._low_precision(module, inputs, kwargs)
        else:
            output = module(*inputs, **kwargs)
        if is_followed:
            self._after_forward(output)
        return output

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Inside, backward passes only accumulate gradients; the next one outside averages all.

        As in torch the forward pass decides, so it must be inside too. `enabled=False` makes
        this do nothing, for loops that accumulate conditionally.
        """
        before = self._reducer.wants_sync
        self._reducer.wants_sync = before and not enabled
        try:
            yield
        finally:
            self._reducer.wants_sync = before

    @contextmanager
    def weighted(self, count: float) -> Iterator[None]:
        """Inside, losses are sums over `count` items; gradients become sums over all ranks'
        items, divided by the number of all items.

            with model.weighted(tokens):
                F.cross_entropy(model(x), y, reduction="sum").backward()

        That is exact for shards of different sizes, a rank with none (`count=0`), and for gradient
        accumulation, where every micro-batch has a block of its own, all but the last under
        `no_sync()`.
        """
        reducer = self._reducer
        before = reducer.weight.enter(count)
        reducer.attach()
        try:
            yield
        finally:
            reducer.weight.leave(before)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Reduce buckets through `hook(state, bucket)` instead; see torch's method of this name."""
        check_hook(hook)
        if self._reducer.has_hook:
            raise HookError(
                "register_comm_hook or register_builtin_comm_hook can only be called once; this "
                "model has a hook, or compression, already.",
                advice="Register one hook, once; wrap the model again for another.",
            )
        self._reducer.set_hook(hook, state)
        # Any other hook decides what ranks exchange, and when.
        is_known = getattr(hook, "__module__", "").endswith(("default_hooks", "powerSGD_hook"))
        self._reducer.agreement.compares &= is_known
        self._is_alone = self._is_plain = False

    def check_in_sync(self) -> None:
        """Raise on every rank if a parameter or a buffer differs on any; call it on all ranks.

        Buffers are compared only where `broadcast_buffers` keeps them equal, as of the
        beginning of the last forward pass; so they are brought up to date first.
        """
        if self.broadcast_buffers:
            self._copy_buffers(root=0)
        step = max(self._reducer.steps - 1, 0)
        checks.check_in_sync(self.process_group, self._named_tensors(), self.device, step)

    @property
    def identity(self) -> int:
        """Which of several models this is, the same number on every rank."""
        return int(self._identity)

    @identity.setter
    def identity(self, number: int) -> None:
        self.__dict__["_identity"] = self._reducer.agreement.identity = number

    @property
    def has_news(self) -> bool:
        return self._reducer.agreement.has_news

    @has_news.setter
    def has_news(self, value: bool) -> None:
        self._reducer.agreement.announces = value

    def begin_step(self, number: int) -> None:
        reducer = self._reducer
        reducer.steps, reducer.wants_sync, reducer.weight.value = number, True, 1.0
        reducer.agreement.announces = False
        if not reducer.weight.is_clean:
            reducer.weight.reset()
        if reducer.observer is not None:
            reducer.observer.watch.step = number

    def weigh(self, weight: float, _shard: int = 0, _of_shard: float = 1.0) -> None:
        """Say what this rank's gradients of a run's step weigh; a run keeps count itself."""
        self._reducer.weight.value = weight

    def take_part(self) -> None:
        """Sum with the others without anything to add, and get what they have.

        A real backward would have to reach a parameter, and then all would think it was used.
        """
        self.weigh(0.0)
        self._reducer.attach()
        self._reducer.take_part()

    def run_short(self) -> bool:
        """Take part in the step's sum only to say that this rank ran out of memory; all ranks
        raise a `FitError` then. False if it is too late for that."""
        reducer = self._reducer
        if reducer.size == 1:
            reducer.forget()
            return True
        return reducer.run_short()

    @property
    def process_group(self) -> Any:
        """The group whose ranks train this model now."""
        membership: Membership = self.__dict__["membership"]
        return membership.group

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:  # the module has new parameters now, and they need hooks
            self._reducer.detach()
            self._build_reducer(named_parameters(self.module), before=self._reducer)
        return result

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("membership", "_reducer", "_transport", "_compression"):
            del state[name]
        state["device_mesh"] = None  # it holds the group
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__["membership"] = Membership.of(default_group())
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._build_transport()
        self._build_reducer(named_parameters(self.module))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        mine = self.__getstate__()
        # Process groups cannot be copied, and a transport among the options may hold one.
        shared = {"membership": self.membership, "_ddp_options": mine.pop("_ddp_options")}
        clone.__dict__ |= {**copy.deepcopy(mine, memo), **shared}
        clone._build_transport()
        clone._build_reducer(named_parameters(clone.module))
        return clone

    @property
    def transport(self) -> str:
        """How gradients travel between ranks, and why so, in words."""
        chosen: TransportChoice = self.__dict__["_transport"]
        return chosen.description

    @property
    def compression(self) -> compress.Compression | None:
        """What shrinks the gradients on their way and counts their bytes, if anything does."""
        found: compress.Compression | None = self.__dict__["_compression"]
        return found

    def _compress(self, reducer: Reducer) -> compress.Compression | None:
        """Put the compression that was asked for into a new reducer, with its memory if any."""
        wanted = self._ddp_options.compression
        if wanted is None:
            return None
        known: compress.Compression | None = self.__dict__.get("_compression")
        state = known or compress.Compression(wanted, self.membership)
        weight = reducer.weight
        state.weight = lambda: weight.value
        if reducer.size > 1:
            reducer.set_hook(compress.hook, state)
        return state

    def _build_transport(self) -> None:
        module: Any = self._modules["module"]
        owned = (*module.parameters(), *module.buffers())
        devices = [tensor.device for tensor in owned]
        wanted = check_transport(self._ddp_options.transport)
        self.__dict__["_transport"] = TransportChoice(self.membership, devices, wanted)
        self.membership.follow(self.on_generation)

    def _build_reducer(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        before: Reducer | None = None,
        observer: Observer | None = None,
    ) -> None:
        module: Any = self._modules["module"]
        sparse, check = sparse_names(module), checks.ModelCheck(module)
        reducer = Reducer(
            named,
            self.membership,
            self._transport,
            capacities_bytes=self._bucket_capacities,
            sparse_names=sparse,
            always_views=self.gradient_as_bucket_view,
        )
        if before is not None:
            reducer.take_over(before)
        self.__dict__["_compression"] = self._compress(reducer)
        reducer.agreement.identity = self._identity
        reducer.observer = observer or (before.observer if before else None)
        reducer.agreement.compares &= self._ddp_options.compare_parameters
        self.__dict__["_reducer"] = reducer
        self.on_generation()
        reducer.check_model = check
        reducer.agreement.is_training = check.is_training
        if reducer.size > 1:
            reducer.attach()
        if self._ddp_options.check_every:
            reducer.after_sync = weakref.WeakMethod(self._check_now_and_then)

    def on_generation(self) -> None:
        """Take note of the group that this model trains in from now on."""
        reducer, size = self._reducer, self.membership.size
        if reducer.observer is None:
            reducer.observer = begin_observing(self.membership, self.device)
        if size > 1 and self.__dict__.get("_is_alone", True):
            announce_exit()
        self.__dict__["_is_alone"] = size == 1
        self.__dict__["_is_plain"] = (
            size == 1
            and not self.device_ids
            and self._low_precision is None
            and reducer.observer is None
        )

    def _check_now_and_then(self) -> None:
        # Inside join() a rank without inputs does not update its copy before the end.
        is_due = self._reducer.steps % self._ddp_options.check_every == 0
        if is_due and not self._join_config.enable:
            self.check_in_sync()

    @outside_graphs
    def _before_forward(self, inputs: Any) -> None:
        if not self._is_alone:
            self._meet_before_forward(inputs)
        if (watched := self._reducer.observer) is None:
            return
        if torch.is_grad_enabled():
            watched.watch.thread = threading.get_ident()
            watched.watch.mark((watched.watch.clock(), Phase.FORWARD))
        else:  # evaluation is the user's own business
            watched.watch.enter(Phase.OTHER)

    def _meet_before_forward(self, inputs: Any) -> None:
        """Do what ranks do together here, and look at what this one is about to compute."""
        watched = self._reducer.observer
        if self._reducer.broken is not None or self.device.type != "cpu":
            self._reducer.on_forward()
        self._reducer.unmarked_wish = None  # a backward inside this forward is not the last one's
        is_joinable = self._reducer.is_joined = self._join_config.enable
        will_broadcast = self.will_sync_module_buffers()
        if watched is not None and (is_joinable or will_broadcast):
            watched.watch.enter(Phase.WAIT)  # to agree, and for buffers, on the other ranks
        if is_joinable:
            Join.notify_join_context(self)
        if will_broadcast:
            root = agree_on_root(self.process_group, self.device, True) if is_joinable else 0
            self._copy_buffers(root)
        wants_sync = self._reducer.wants_sync and torch.is_grad_enabled()
        if self._reducer.steps <= DATASET_STEP and torch.is_grad_enabled():
            self._reducer.agreement.inputs.see(self._reducer.steps, inputs)
        if torch.is_grad_enabled() and not wants_sync:
            self._reducer.agreement.take_fingerprint(self._reducer.steps, self.device)
        if is_joinable:
            any_wants_sync(self.process_group, self.device, wants_sync)
        self.__dict__["_syncs_buffers_next"] = wants_sync
        if wants_sync:
            if has_rpc_agent():
                refuse_distributed_autograd()
            self._check_model()

    def _check_model(self) -> None:
        """Raise if gradients would go to parameters without a hook of ours.

        Such a backward passes unnoticed, so the sign is a forward pass since which there was none.
        """
        reducer = self._reducer
        if reducer.backwards == self._backwards_before:
            checks.check_parameters_are_known(self.module, reducer.parameters)
        self.__dict__["_backwards_before"] = reducer.backwards

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """What must be equal on all ranks."""
        buffers = named_buffers(self.module) if self.broadcast_buffers else []
        return [*named_parameters(self.module), *buffers]

    def will_sync_module_buffers(self) -> bool:
        if not self._has_buffers and self._reducer.steps < BUFFERS_APPEAR_STEPS:
            self.__dict__["_has_buffers"] = any(m._buffers for m in checks.modules(self.module))
        return self._syncs_buffers_next and self.broadcast_buffers and self._has_buffers

    def _copy_buffers(self, root: int) -> None:
        """Copy the root's buffers; a rank that has others, or is at another step, is an error.

        Not on GPUs, where the host would have to wait to see it.
        """
        buffers = [buffer for _, buffer in named_buffers(self.module)]
        mine = [self._reducer.steps, len(buffers), sum(buffer.numel() for buffer in buffers)]
        stamp = [torch.tensor(mine)] if buffers and self.device.type == "cpu" else []
        self._copy_from(root, [*stamp, *buffers], "Copying buffers")
        if stamp and stamp[0].tolist() != mine:
            step, count, numel = stamp[0].tolist()
            raise DesyncError(
                f"Buffers: rank {root} sent {count} with {numel:,} elements at step {step}, "
                f"rank {self.membership.rank} has {mine[1]} with {mine[2]:,} at step {mine[0]}.",
                advice="Run the same forward passes on every rank.",
            )

    def _copy_model(self, root: int) -> None:
        """Copy the root's parameters, and its buffers where they are kept equal, to all ranks."""
        tensors = [tensor for _, tensor in self._named_tensors()]
        self._copy_from(root, tensors, "Copying the final model")

    def _copy_from(self, root: int, tensors: Sequence[Tensor], what: str) -> None:
        is_root = self.membership.rank == root
        checks.broadcast_tensors(self._reducer.copy, tensors, root, what, is_root=is_root)

    @outside_graphs
    def _after_forward(self, output: Any) -> None:
        """Let the backward of this forward pass know what the forward pass wanted."""
        reducer, wants_sync = self._reducer, self._reducer.wants_sync
        if self._is_alone and reducer.observer is not None:
            reducer.observer.observe_alone(output, wants_sync)
        if self._is_alone or not torch.is_grad_enabled():
            return
        if (observer := reducer.observer) is not None:
            observer.watch.mark((observer.watch.clock(), Phase.OTHER))
            if observer.watch.records:
                observer.note_samples(output)

        on_output_grad = partial(reducer.on_output_grad, wants_sync)
        reducer.unmarked_wish = wants_sync
        for tensor in [output] if isinstance(output, Tensor) else find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output_grad)  # type: ignore[no-untyped-call]
                reducer.unmarked_wish = None
