"""Data-parallel training in its plainest form: one all-reduce per parameter, after backward.

Read this first. `DistributedDataParallel` computes the same gradients, packed into few messages
that travel while backward is still running; tests hold the two against each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from paceline.ddp import checks
from paceline.ddp.wrapper import Wrapper, named_buffers, named_parameters
from paceline.errors import FitError
from paceline.group import Membership, World, all_reduce, broadcast, find_tensors, word_device
from paceline.torch_private import at_backward_end

_identities = count(1)


class NaiveEngine(Wrapper):
    """Keeps one model equal on all ranks by summing gradients when backward has ended.

        forward --(backward reaches an output)--> waits for the end of backward
                --(it has reached a parameter)--> every gradient is summed, and divided

    Invariant: every rank issues the same collectives in the same order in every step. So all
    first agree on which parameters have a gradient on any rank, and then sum those, in the order
    of the model; a rank without a gradient for one of them contributes zeros.

    Buffers are rank 0's at the start. Sparse gradients become dense. A world of one adds nothing.
    """

    def __init__(self, module: nn.Module, world: World | Membership) -> None:
        named, buffers = named_parameters(module), named_buffers(module)
        if (problem := checks.find_problem(named, buffers, None, None)) is not None:
            raise problem
        nn.Module.__init__(self)
        # Set before `module`: from then on, names that the module has are set on the module.
        self.membership = world if isinstance(world, Membership) else Membership.of(world.group)
        self._step = 0
        self._weight = 1.0
        self.has_news = self._is_short = False
        self._wants_sync = True
        self._is_touched = False  # by a backward, since the last forward or the last sum
        self._hooked: set[int] = set()
        self.identity = next(_identities)
        self.module = module
        if self.membership.size > 1:
            self._copy_rank_0()

    @torch.no_grad()
    def _copy_rank_0(self) -> None:
        """Begin with the parameters, the buffers and the identity of rank 0."""
        identity = torch.tensor(self.identity, device=self._word_device())
        for tensor in (identity, *self.module.parameters(), *self.module.buffers()):
            copied = tensor.contiguous()
            broadcast(self.membership.group, copied, 0, "Copying rank 0's model")
            tensor.copy_(copied)
        self.identity = int(identity)

    def _word_device(self) -> torch.device:
        """Where a message that is not a gradient travels."""
        return word_device(self.membership.group, next(self.module.parameters()).device)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and ask its outputs to say when backward comes."""
        output = self.module(*inputs, **kwargs)
        if self.listens and torch.is_grad_enabled():
            self._is_touched = False
            self._hook_parameters()
            # As in torch, `no_sync()` counts where the forward pass is.
            hook = partial(self._on_output_grad, self._wants_sync)
            for tensor in find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return output

    @property
    def listens(self) -> bool:
        """Whether there is anything to do when backward has ended."""
        return self.membership.size > 1

    def _hook_parameters(self) -> None:
        """Hook every parameter once, as soon as it is trained."""
        engine = weakref.ref(self)  # a hook that kept it alive would do so for good

        def on_param_grad(_param: Tensor) -> None:
            if (found := engine()) is not None:
                found._is_touched = True

        for param in self.module.parameters():
            if param.requires_grad and id(param) not in self._hooked:
                param.register_post_accumulate_grad_hook(on_param_grad)  # type: ignore[no-untyped-call]
                self._hooked.add(id(param))

    def _on_output_grad(self, wants_sync: bool, _grad: Tensor) -> None:
        # No parameter could ask for this: a checkpointed one gets its gradient in a backward inside
        # this one, whose end is too early.
        at_backward_end(partial(self._on_backward_end, wants_sync))

    def _on_backward_end(self, wants_sync: bool) -> None:
        # Once per output that was reached, but the first sum leaves nothing to do. A backward that
        # reached no parameter computed something else, such as a slope.
        if wants_sync and self._is_touched:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        """Replace every gradient by the sum over all ranks, divided by the sum of their weights."""
        weight, self._weight, self._is_touched = self._weight, 1.0, False
        group = self.membership.group
        if group.size() == 1:
            return
        trained = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        has_grad = [float(param.grad is not None) for _, param in trained]
        words = [weight, self.has_news, self._is_short, *has_grad]
        agreed = torch.tensor(words, dtype=torch.float64, device=self._word_device())
        all_reduce(group, agreed, f"Step {self._step}: agreeing on who has which gradient")
        total_weight, self.has_news, short, *users = agreed.tolist()
        if short:
            raise FitError(
                f"Step {self._step}: {short:.0f} of {group.size()} ranks ran out of memory."
            )
        for (name, param), count_of_users in zip(trained, users, strict=True):
            if not count_of_users:
                continue  # stays None, so that no optimizer touches the parameter
            total = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
            if param.grad is not None:
                total += param.grad
            all_reduce(group, total, f"Step {self._step}: the sum of the gradient of {name!r}")
            param.grad = total.div_(total_weight) if total_weight else total.zero_()

    def begin_step(self, number: int) -> None:
        self._step, self._weight, self._wants_sync = number, 1.0, True
        self.has_news = self._is_short = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes only accumulate gradients; the next one outside averages all."""
        before, self._wants_sync = self._wants_sync, False
        try:
            yield
        finally:
            self._wants_sync = before

    def weigh(self, weight: float, _shard: int = 0, _of_shard: float = 1.0) -> None:
        """Say how many items this rank's losses are sums over; the next average divides by all."""
        self._weight = weight

    def take_part(self) -> None:
        self._weight = 0.0
        self._average()

    def run_short(self) -> bool:
        """Take part only to say that this rank ran out of memory; all ranks raise then."""
        self._is_short = True
        with suppress(FitError):
            self._average()
        return True

    def on_generation(self) -> None:
        """Nothing is kept between steps: every sum asks the membership for its group."""
