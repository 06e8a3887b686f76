"""DistributedDataParallel: one process per device, gradients averaged after every backward.

The class is thin. It checks and copies the model when it is wrapped, looks after buffers in
the forward pass, and leaves gradients to the `Reducer`, whose hooks do their work whether or not
a forward pass went through the wrapper.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from paceline import comm
from paceline.comm import Membership, tree
from paceline.comm.world import default_group
from paceline.ddp import checks
from paceline.ddp.torch_compat import LowPrecision, TorchSurface, UnevenInputs
from paceline.ddp.wrapper import Wrapper
from paceline.errors import DesyncError, HookError, UsageError, check_whole
from paceline.gradients import compress
from paceline.gradients.backward import keep_out_of_graphs, refuse_distributed_autograd
from paceline.gradients.hooks import Hook, check_hook
from paceline.gradients.reducer import Reducer
from paceline.observe import stopwatch
from paceline.transport import Transport, TransportChoice, check_transport, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPOptions:
    """What torch's class has no argument for."""

    check_every: int = 0
    """Compare all replicas bit by bit after every so many synchronised steps; 0 means never."""

    compare_parameters: bool = True
    """Compare a fingerprint of some of the parameters in the trailers of gradients, so that one
    that differs on any rank is an error within 100 steps."""

    transport: str | Transport = "auto"
    """How gradients travel: "shared_memory" between the ranks of a host, "c10d" through
    torch.distributed, "auto" the first where it is possible; or an object that has the methods
    of `paceline.transport.Transport`."""

    compression: str | compress.PowerSGD | None = None
    """Send gradients in fewer bytes: "bf16", "fp16", "powersgd" or a `compress.PowerSGD(...)`."""

    def __post_init__(self) -> None:
        check_transport(self.transport)
        if self.compression is not None:
            compress.parse(self.compression)
        check_whole("check_every", self.check_every, 0)


DEFAULT_OPTIONS = DDPOptions()
BUFFERS_APPEAR_STEPS = 3
"""A model without buffers when it is wrapped is searched for some in its first steps."""


class DistributedDataParallel(TorchSurface, Wrapper, Joinable):
    """Keeps one model equal on all ranks by averaging its gradients after every backward.

    Takes torch's arguments. These have nothing left to do and are accepted without effect:
    `find_unused_parameters`, `static_graph`, `skip_all_reduce_unused_params` (any parameter may be
    used or not, on any rank, at any step), `batched_grad_copy` (always), `check_reduction`, and
    `delay_all_reduce_named_params` with `param_to_hook_all_reduce` (averaged with the rest).
    `gradient_as_bucket_view` chooses only whether a gradient tensor that somebody else
    refers to may be replaced too; see `gradients.buffer`.
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
        *,
        options: DDPOptions = DEFAULT_OPTIONS,
    ) -> None:
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise UsageError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce belong together.",
                advice="Pass both, or neither: they have no effect here.",
            )
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"A model must be a torch.nn.Module, not {type(module).__name__}.",
                advice="Pass the module itself, before any call.",
            )
        if not isinstance(options, DDPOptions):
            raise UsageError(f"options is {options!r}.", advice="Pass DDPOptions(...).")
        membership = _pick_membership(process_group, device_mesh)
        group = membership.group
        named = checks.named_parameters(module)
        buffers = checks.named_buffers(module)
        problem = checks.find_problem(named, buffers, device_ids, output_device)
        device = named[0][1].device if named else torch.device("cpu")
        capacities = _bucket_capacities(bucket_cap_mb, bucket_cap_mb_list)
        # torch's newer argument speaks of forward passes only; the older one of wrapping as well.
        sync_buffers_now = forward_sync_buffers is not None or broadcast_buffers is not False
        number = 0
        observer = stopwatch.begin(membership, device)  # who is missing below is named
        if init_sync and group.size() > 1:
            compared = buffers if sync_buffers_now else []
            description = [] if problem else checks.describe(named, compared)
            transport = "" if isinstance(options.transport, str) else describe(options.transport)
            engine = [device.type, capacities, str(options.compression), transport]
            number = checks.verify_same_model(group, description, device, problem, engine)
        elif problem is not None:
            raise problem

        nn.Module.__init__(self)
        Joinable.__init__(self)
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
        self._number = number
        self.device_mesh = device_mesh
        self._low_precision = LowPrecision(mixed_precision, module) if mixed_precision else None
        self._has_buffers = False
        self._syncs_buffers_next = True
        self._backwards_before = -1
        self.module = module
        self._build_transport()
        self._build_reducer(named, observer=observer)
        self._transport.get()
        if init_sync and group.size() > 1:
            tensors = [tensor for _, tensor in (*named, *(buffers if sync_buffers_now else []))]
            self._copy_from(0, tensors, "Copying rank 0's model")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; on several ranks also bring its buffers up to date first."""
        module: Any = self._modules["module"]
        if self._is_plain:  # a world of one must cost what the bare model costs
            return module(*inputs, **kwargs)
        alone = self._reducer.observer if self._is_alone else None
        if not self._is_alone:
            self._around_forward(self._before_forward)
        elif alone is not None:
            self._around_forward(alone.forward_begins)
        if self.device_ids:
            inputs, kwargs = tree.map_tensors(self._to_device, (inputs, kwargs))
        if self._low_precision is not None:
            output = self._low_precision(module, inputs, kwargs)
        else:
            output = module(*inputs, **kwargs)
        if not self._is_alone and torch.is_grad_enabled():
            self._around_forward(self._mark_outputs, output)
        elif alone is not None:
            self._around_forward(alone.follow_alone, output, self._reducer.wants_sync)
        return output

    def _around_forward(self, function: Callable[..., None], *args: Any) -> None:
        if torch.compiler.is_compiling():
            from paceline.ddp import uncompiled

            uncompiled.call(function, *args)
        else:
            function(*args)

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
        backwards, before = reducer.backwards, reducer.weight.enter(count)
        reducer.attach()
        try:
            yield
        finally:
            reducer.weight.leave(before, had_backward=reducer.backwards > backwards)

    def _begin_step(self, number: int) -> None:
        """A run begins its step `number`: nothing is accumulated yet, and errors name that step."""
        reducer = self._reducer
        reducer.steps, reducer.wants_sync, reducer.weight.value = number, True, 1.0
        if not reducer.weight.is_clean:
            reducer.weight.reset()
        if reducer.observer is not None:
            reducer.observer.watch.step = number

    def _weigh(self, weight: float) -> None:
        """Say what this rank's gradients of a run's step weigh; a run keeps count itself."""
        self._reducer.weight.value = weight

    def _take_part(self) -> None:
        """Sum with the others without anything to add, and get what they have.

        A real backward would have to reach a parameter, and then all would think it was used.
        """
        self._weigh(0.0)
        self._reducer.attach()
        self._reducer.take_part()

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Reduce buckets through `hook(state, bucket)` instead; see torch's method of this name."""
        check_hook(hook)
        if self._reducer.has_hook:
            raise HookError(
                "This model has a communication hook, or compression, already.",
                advice="Register one hook, once; wrap the model again for another.",
            )
        self._reducer.set_hook(hook, state)
        # Any other hook decides what ranks exchange, and when.
        is_known = getattr(hook, "__module__", "").endswith(("default_hooks", "powerSGD_hook"))
        self._reducer.compares &= is_known
        self._is_alone = self._is_plain = False

    def check_in_sync(self) -> None:
        """Raise on every rank if a parameter or a buffer differs on any; call it on all ranks.

        Buffers are compared only where `broadcast_buffers` keeps them equal, as of the
        beginning of the last forward pass; so they are brought up to date first.
        """
        if self.broadcast_buffers:
            self._broadcast_buffers(root=0)
        step = max(self._reducer.steps - 1, 0)
        checks.check_in_sync(self.process_group, self._named_tensors(), self.device, step)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for loops of different lengths: ranks that finish early keep company."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> UnevenInputs:
        divide = kwargs.get("divide_by_initial_world_size", True)
        return UnevenInputs(self, divide_by_initial_world_size=divide)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def process_group(self) -> Any:
        """The group whose ranks train this model now."""
        membership: Membership = self.__dict__["membership"]
        return membership.group

    @property
    def ddp_options(self) -> DDPOptions:
        """The options that this model was wrapped with."""
        options: DDPOptions = self.__dict__["_ddp_options"]
        return options

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def shadow_step(self, weight: float) -> None:
        """Repeat the collectives of one step of the other ranks, as a rank without inputs."""
        if self._will_broadcast_buffers():
            self._broadcast_buffers(root=self._agree_on_root(is_candidate=False))
        wants_sync = self._any_wants_sync(False)
        self._syncs_buffers_next = wants_sync
        if wants_sync:
            self._reducer.shadow(weight)

    def take_final_model(self, is_last_joiner: bool) -> None:
        """Copy the model of a rank that was there to the end to all others."""
        root = self._agree_on_root(is_last_joiner)
        tensors = [tensor for _, tensor in self._named_tensors()]
        self._copy_from(root, tensors, "Copying the final model")

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        if assign:  # the module has new parameters now, and they need hooks
            self._reducer.detach()
            self._build_reducer(checks.named_parameters(self.module), before=self._reducer)
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
        self._build_reducer(checks.named_parameters(self.module))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        mine = self.__getstate__()
        shared = {"membership": self.membership, "_ddp_options": mine.pop("_ddp_options")}
        clone.__dict__ |= {**copy.deepcopy(mine, memo), **shared}
        clone._build_transport()
        clone._build_reducer(checks.named_parameters(clone.module))
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
        found = checks.modules(self.module)
        owned = chain(*(chain(m._parameters.values(), m._buffers.values()) for m in found))
        devices = [tensor.device for tensor in owned if tensor is not None]
        wanted = check_transport(self._ddp_options.transport)
        self.__dict__["_transport"] = TransportChoice(self.membership, devices, wanted)
        self.membership.follow(self._on_generation)

    def _build_reducer(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        before: Reducer | None = None,
        observer: stopwatch.Observer | None = None,
    ) -> None:
        sparse = checks.sparse_names(self.module)
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
        reducer.number = self._number
        reducer.observer = observer or (before.observer if before else None)
        reducer.compares &= self._ddp_options.compare_parameters
        self.__dict__["_reducer"] = reducer
        self._on_generation()
        module, membership, device = weakref.ref(self.module), self.membership, self.device
        reducer.registrations = checks.count_registrations()
        reducer.check_model = lambda known: checks.check_parameters_are_known(module(), known)
        reducer.compare = lambda tensors, step: checks.check_in_sync(
            membership.group, tensors, device, step
        )
        if reducer.size > 1:
            reducer.attach()
        if self._ddp_options.check_every:
            reducer.after_sync = weakref.WeakMethod(self._check_now_and_then)

    def _on_generation(self) -> None:
        """Take note of the group that this model trains in from now on."""
        reducer, size = self._reducer, self.membership.size
        if reducer.observer is None:
            reducer.observer = stopwatch.begin(self.membership, self.device)
        if size > 1:
            comm.announce_exit()
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

    def _before_forward(self) -> None:
        self._reducer.on_forward()
        self._reducer.unmarked_wish = None  # a backward inside this forward is not the last one's
        watched = self._reducer.observer
        is_joinable = self._reducer.is_joined = self._join_config.enable
        will_broadcast = self._will_broadcast_buffers()
        if watched is not None and (is_joinable or will_broadcast):
            watched.forward_comes()
        if is_joinable:
            Join.notify_join_context(self)
        if will_broadcast:
            root = self._agree_on_root(is_candidate=True) if is_joinable else 0
            self._broadcast_buffers(root)
        wants_sync = self._reducer.wants_sync and torch.is_grad_enabled()
        if is_joinable:
            self._any_wants_sync(wants_sync)
        self.__dict__["_syncs_buffers_next"] = wants_sync
        if wants_sync:
            refuse_distributed_autograd()
            self._check_model()
        if watched is not None:
            watched.forward_begins()

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
        buffers = checks.named_buffers(self.module) if self.broadcast_buffers else []
        return [*checks.named_parameters(self.module), *buffers]

    def _will_broadcast_buffers(self) -> bool:
        if not self._has_buffers and self._reducer.steps < BUFFERS_APPEAR_STEPS:
            self.__dict__["_has_buffers"] = any(m._buffers for m in checks.modules(self.module))
        return self._syncs_buffers_next and self.broadcast_buffers and self._has_buffers

    def _broadcast_buffers(self, root: int) -> None:
        """Copy the root's buffers; a rank that has others, or is at another step, is an error.

        Not on GPUs, where the host would have to wait to see it.
        """
        buffers = [buffer for _, buffer in checks.named_buffers(self.module)]
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

    def _copy_from(self, root: int, tensors: Sequence[Tensor], what: str) -> None:
        transport, is_root = self._transport.get(), self.membership.rank == root
        checks.broadcast_tensors(lambda b: transport.copy(b, root, what), tensors, is_root=is_root)

    def _mark_outputs(self, output: Any) -> None:
        """Let the backward of this forward pass know what the forward pass wanted."""
        reducer, wants_sync = self._reducer, self._reducer.wants_sync
        if reducer.observer is not None:
            reducer.observer.forward_ends(output)

        def on_output_grad(_grad: Tensor) -> None:
            reducer.on_output_grad(wants_sync)

        keep_out_of_graphs(on_output_grad)
        reducer.unmarked_wish = wants_sync
        for tensor in [output] if isinstance(output, Tensor) else tree.tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output_grad)  # type: ignore[no-untyped-call]
                reducer.unmarked_wish = None

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _any_wants_sync(self, mine: bool) -> bool:
        wishes = torch.tensor([float(mine)], device=self.device)
        comm.all_reduce(self.process_group, wishes, "Asking whether gradients will be averaged")
        return bool(wishes.item() > 0)

    def _agree_on_root(self, is_candidate: bool) -> int:
        """The highest rank that is a candidate."""
        mine = torch.tensor([int(is_candidate)], device=self.device)
        votes = comm.all_gather(self.process_group, mine, "Agreeing on whose buffers count")
        return max((rank for rank, vote in enumerate(votes) if vote.item()), default=0)


def _pick_membership(process_group: Any, device_mesh: Any) -> Membership:
    if process_group is not None and device_mesh is not None:
        raise UsageError(
            "Cannot specify both process_group and device_mesh arguments.", advice="Pass one."
        )
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise UsageError(
                f"Only 1D device mesh is supported, but device_mesh has {device_mesh.ndim} "
                "dimensions.",
                advice="Pass one of its dimensions, device_mesh['name'].",
            )
        return Membership.of(device_mesh.get_group(mesh_dim=0))
    if isinstance(process_group, Membership):
        return process_group
    membership = Membership.of(default_group() if process_group is None else process_group)
    if not hasattr(membership.group, "allreduce"):
        if not isinstance(process_group, int):  # what torch gives to ranks outside a new group
            raise UsageError(
                f"process_group is {process_group!r:.80}.",
                advice="Pass what torch.distributed.new_group() returned, or leave it out.",
            )
        raise UsageError(
            "This process is not a member of the process group that was passed.",
            advice="Wrap the model only on the ranks that belong to the group.",
        )
    return membership


def _bucket_capacities(cap_mb: float | None, caps_mb: Sequence[float] | None) -> list[int] | None:
    if caps_mb:
        capacities = list(caps_mb)
    elif cap_mb is not None:
        capacities = [cap_mb]
    else:
        return None
    if not all(0 < cap < float("inf") for cap in capacities):
        raise UsageError(
            f"Bucket capacities must be positive and finite, not {capacities} MiB.",
            advice="Leave bucket_cap_mb out to get the default.",
        )
    return [max(1, int(cap * 2**20)) for cap in capacities]
