"""What changes when a step commits: parameters, optimizer, scheduler, scaler; and nothing else.

`Update` is what a run asks of whatever applies its gradients. `WholeUpdate` steps every parameter
on every worker: local arithmetic, so two workers with equal gradients have equal state afterwards.

NaN and infinity are found before they reach the parameters, on every worker in the same step. A
loss that is not finite makes its gradients NaN, and those reach every worker with the sum. So each
looks at the averaged gradients alone, all see the same, and only when something is wrong do they
ask each other whose shard it was. See Note [What is looked at].
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import NotFiniteError, UsageError, check_members
from paceline.group import HostCopy, Membership, exchange
from paceline.telemetry import follow_optimizers
from paceline.torch_private import (
    can_skip,
    foreach_mul_,
    foreach_norm,
    sparse_values,
    step_unless,
)
from paceline.update.average import WeightAverage
from paceline.update.exchange import find_exchanged
from paceline.update.kind import needs_closure, params_of

_MOST_LOOKED_AT = 128
"""So many gradients at most are looked at in a step, spread over the model."""
_SAMPLES_SHOWN = 8


class Loss(NamedTuple):
    """The loss of one shard as it was computed."""

    value: Tensor
    shard: int
    samples: Sequence[int]
    """Their numbers; of a stream, -1."""


class Update(Protocol):
    """How the gradients of a step become new parameters; `RunOptions(update=)` takes any object.

        begin --> backward, once per shard --> commit, or, when the step fails, abandon

    `commit` comes with gradients that are averaged, and does the same on every worker.
    """

    parts: dict[str, Any]
    """The objects it changes that have a `state_dict()`, by name; one of them is `optimizer`."""

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with on their way."""

    def begin(self, step: int) -> None:
        """A step begins, or the same one again."""

    def backward(self, loss: Tensor, factor: float) -> None:
        """Add the gradients of `loss` times `factor`."""

    def multiply_grads(self, factor: float) -> None:
        """Multiply the gradients, where the weight of a loss is known only after backward."""

    def commit(self, losses: Sequence[Loss]) -> Tensor | None:
        """Check, clip and apply the gradients; returns their length where it was computed."""

    def rate(self, metric: float) -> None:
        """Tell a scheduler that waits for a metric, between two steps."""

    def abandon(self) -> None:
        """Forget the gradients of a step that has failed."""

    def finish(self) -> None:
        """Be done with all steps so far; raises if one of them was not finite."""


_MEMBERS = [*Update.__annotations__, *(name for name in vars(Update) if name[0] != "_")]


def check_update(value: Any) -> None:
    """Refuse an object that cannot stand for an `Update`, and name what it lacks."""
    advice = f'Pass "whole", "sharded", "auto", or an object with {", ".join(_MEMBERS)}.'
    check_members("update", value, _MEMBERS, advice)
    if "optimizer" not in value.parts:
        raise UsageError("update.parts has no optimizer.", advice="A run saves and loads it.")


class WholeUpdate:
    """Every worker steps everything.

    Invariant: between `begin` and `commit` no other code changes gradients or calls the optimizer,
    as a loop that was written for torch would; it is refused.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        optimizer: Optimizer,
        *,
        scheduler: Any,
        scaler: Any,
        clip_norm: float | None,
        finite: FiniteCheck | None,
        average: WeightAverage | None,
    ) -> None:
        """Without `finite` nothing looks for NaN; a scaler expects it, and skips such steps."""
        if needs_closure(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} calls the model itself, several times in one step, "
                "and a run hands it the gradients of one pass.",
                advice="Use an optimizer whose step() needs no closure.",
            )
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm is {clip_norm}.", advice="Pass a number above 0, or None.")
        if scaler is not None and not scaler.is_enabled():
            scaler = None
        parts = {"optimizer": optimizer, "scheduler": scheduler, "ema": average, "scaler": scaler}
        self.parts: dict[str, Any] = {name: p for name, p in parts.items() if p is not None}
        self._params, self._optimizer, self._scaler = params, optimizer, scaler
        self._take_groups()
        self._scheduler, self._clip_norm, self._average = scheduler, clip_norm, average
        self._finite = finite
        self._step = 0
        self._refusal: Any = None
        self._is_stepping = False  # a step of the optimizer may be one of others that it wraps
        self._noted: tuple[Parameter, int, int] | None = None
        self._schedule_at: Any = None
        self._needs_metric = scheduler is not None and needs_metric(scheduler)

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def begin(self, step: int) -> None:
        # Known only once a commit has stepped it: a checkpoint may be loaded before.
        if self._schedule_at is not None and self._schedule_at != self._scheduler.last_epoch:
            self._schedule_at = self._scheduler.last_epoch
            raise UsageError(
                "The scheduler was stepped between two steps.",
                advice="A run steps it itself, once per step or when its metric is measured: leave "
                "scheduler.step() out.",
            )
        if len(self._optimizer.param_groups) != self._groups:
            self._take_groups()
        for param in self._params:
            param.grad = None
        self._step, self._noted = step, None
        self._refusal = self._optimizer.register_step_pre_hook(_refuse_user_step)
        hooks: Any = self._optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(self._refusal.id, last=False)  # before the update is shared out

    def _take_groups(self) -> None:
        """Look at what the optimizer steps; the script may add groups in mid-run."""
        self._trained, self._groups = params_of(self._optimizer), len(self._optimizer.param_groups)
        refuse_other_params(self._params, self._trained)

    def backward(self, loss: Tensor, factor: float) -> None:
        self._refuse_changed_grads()
        # Zero times infinity, and times NaN, is NaN: a loss that is not finite makes its gradients
        # NaN on every worker, and no host has to look at it.
        scaled = loss * (factor if self._finite is None else loss.detach() * 0 + factor)
        if self._scaler is not None:
            scaled = self._scaler.scale(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        self.note_grads()

    def note_grads(self) -> None:
        """Remember what the gradients are now: any other code that changes them is refused."""
        for param in self._params:
            if (grad := param.grad) is not None:
                # Not the gradient itself: a reference to it keeps the engine from using its memory.
                self._noted = param, id(grad), grad._version
                break

    @torch.no_grad()
    def multiply_grads(self, factor: float) -> None:
        self._refuse_changed_grads()
        if grads := [param.grad for param in self._params if param.grad is not None]:
            foreach_mul_(grads, factor)
        self.note_grads()

    def commit(self, losses: Sequence[Loss]) -> Tensor | None:
        self._refuse_changed_grads()
        self._noted, norm = None, None
        if all(param.grad is None for param in self._trained):
            raise UsageError(
                f"Step {self._step}: none of the optimizer's parameters has a gradient, so the "
                "losses do not depend on them.",
                advice="Compute every loss from the output of run.model, not of a copy of it; for "
                "a batch that should not count, pass items=0.",
            )
        if self._scaler is not None and not losses and self._params:
            # It begins with the first loss, and this worker has none, only the others' gradients.
            self._scaler.scale(self._params[0].new_zeros(()))
        if self._clip_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            norm = total_norm(param.grad for param in self._trained)
        is_bad = None
        if self._finite is not None and self._scaler is None:
            is_left_out = self._finite.is_late and self._can_leave_out()
            is_bad = self._finite.check(self._step, losses, norm, zeroes=not is_left_out)
        self._refusal.remove()
        if norm is not None and self._clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self._trained, self._clip_norm, norm)
        self._step_optimizer(is_bad)
        if self._scheduler is not None and not self._needs_metric:
            self._step_scheduler()
        if self._average is not None:
            self._average.update(self._step)
        return norm

    def _can_leave_out(self) -> bool:
        return can_skip(self._optimizer) and find_exchanged(self._optimizer) is None

    def rate(self, metric: float) -> None:
        if self._needs_metric:
            self._step_scheduler(metric)

    def _step_scheduler(self, *metric: float) -> None:
        self._scheduler.step(*metric)
        self._schedule_at = getattr(self._scheduler, "last_epoch", None)

    def abandon(self) -> None:
        if self._refusal is not None:
            self._refusal.remove()
        self._schedule_at = None  # the state of a worker that is further may be loaded now
        for param in self._params:
            param.grad = None
        if self._finite is not None:
            self._finite.forget(self._step)
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()  # as its update() does after every step

    def finish(self) -> None:
        if self._finite is not None:
            self._finite.ask()

    def refuse_others(self, known: Collection[Any]) -> Callable[[], None]:
        """Refuse steps of optimizers that a run knows nothing of; what is returned ends that.

        `known` are objects that it saves.
        """

        def refuse(other: Optimizer) -> None:
            if other is self._optimizer or self._is_stepping or any(other is k for k in known):
                return
            ours = {id(param) for param in self._params}
            if any(id(param) in ours for param in params_of(other)):
                raise UsageError(
                    f"A second optimizer, {type(other).__name__}, was stepped, with parameters of "
                    "the run's model: the run neither saves it nor gives it to a new worker.",
                    advice="Give all parameters to the run's optimizer, in groups; or, if it is "
                    'stepped alike on all workers, pass state={"second": optimizer}.',
                )

        return follow_optimizers(refuse)

    def _step_optimizer(self, is_bad: Tensor | None) -> None:
        """Step, unless the device finds `is_bad` then."""
        self._is_stepping = True
        try:
            if is_bad is not None:
                step_unless(self._optimizer, is_bad)
            elif self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()
        finally:
            self._is_stepping = False

    def _refuse_changed_grads(self) -> None:
        """One gradient tells of all: it must be as the last backward has left it, and before the
        first there is none."""
        if self._noted is None:
            for param in self._params:
                if param.grad is not None:
                    raise UsageError(
                        f"Step {self._step}: there are gradients that no step.backward() has "
                        "computed.",
                        advice="Add all losses of a batch up and call step.backward() once, "
                        "instead of loss.backward(): what a loss weighs depends on the shards and "
                        "the workers.",
                    )
            return
        param, grad, version = self._noted
        now = param.grad
        if now is None or (id(now), now._version) != (grad, version):
            raise UsageError(
                f"Step {self._step}: gradients were changed or cleared after step.backward().",
                advice="Leave zero_grad() and clipping to the run: it clears gradients itself, and "
                "clips those of the whole batch with clip_norm=.",
            )


def read_rate(optimizer: Any) -> float | None:
    """What the first group learns with, where it is a plain number."""
    lr = optimizer.param_groups[0].get("lr")
    return lr if isinstance(lr, int | float) else None


def needs_metric(scheduler: Any) -> bool:
    """Whether it steps on a metric, as `ReduceLROnPlateau` does, and not once per step."""
    return "metrics" in inspect.signature(scheduler.step).parameters


def _refuse_user_step(*_: Any) -> None:
    raise UsageError(
        "optimizer.step() was called inside a step, which calls it when all gradients are there.",
        advice="Leave it out: inside the block only step.backward() is called.",
    )


def refuse_other_params(params: Iterable[Parameter], trained: Iterable[Parameter]) -> None:
    """Raise if an optimizer has parameters that are not among these of the model."""
    known = {id(param) for param in params}
    strange = [tuple(p.shape) for p in trained if id(p) not in known]
    if strange:
        raise UsageError(
            f"The optimizer has {len(strange)} parameters that are not the model's, the first of "
            f"shape {strange[0]}, so their gradients would not be averaged.",
            advice="Build the optimizer from the parameters of this very model, and put layers of "
            "the loss into it.",
        )


class _Looked(NamedTuple):
    """What the device was asked to find out, and who took part when it was."""

    is_bad: HostCopy
    step: int
    losses: Sequence[Loss]
    generation: int


class FiniteCheck:
    """Looks at the gradients of every step, or, on a GPU, has the device look and asks later.

    CPU:   averaged gradients --look--> raise, before the optimizer has seen them
    GPU:   averaged gradients --(device: one is not finite)--> a fused optimizer does not step,
           another one steps with zeros
           the next step --ask--> raise; in another generation without asking the others
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Parameter]],
        membership: Membership,
        *,
        is_complete: bool,
        is_saved: bool,
    ) -> None:
        """`is_complete` looks at every element; see Note [What is looked at]."""
        self._is_saved = is_saved
        self._named, self._membership, self._is_complete = named, membership, is_complete
        self.is_late = bool(named) and named[0][1].device.type != "cpu"
        """Whether the device looks, and its answer is read a step later."""
        self._pending: _Looked | None = None

    @torch.no_grad()
    def check(
        self, step: int, losses: Sequence[Loss], norm: Tensor | None, *, zeroes: bool = True
    ) -> Tensor | None:
        """Look at the gradients of `step`; `norm` is their length where it is known.

        What the device finds later is returned if `zeroes` is False; else bad gradients become 0.
        """
        grads = [param.grad for _, param in self._named if param.grad is not None]
        if not grads:
            return None
        if self.is_late:
            self.forget(step)
            self.ask()
            is_bad = self._look_later(step, grads, losses, norm)
            if not zeroes:
                return is_bad
            for grad in grads:
                _dense(grad).masked_fill_(is_bad, 0)
        elif not self._looks_finite(grads, norm):
            self._raise(step, losses)
        return None

    def ask(self) -> None:
        """Raise if the last step that was looked at was not finite."""
        looked, self._pending = self._pending, None
        if looked is not None and bool(looked.is_bad.read()):
            # A newcomer has nothing to ask about, and would not answer.
            is_alone = looked.generation != self._membership.generation
            self._raise(looked.step, looked.losses, is_alone=is_alone)

    def forget(self, step: int) -> None:
        """Step `step` is given up or done again, and so are those after it; not those before."""
        if self._pending is not None and self._pending.step >= step:
            self._pending = None

    def _looks_finite(self, grads: list[Tensor], norm: Tensor | None) -> bool:
        if norm is not None:
            return math.isfinite(norm.item())
        if self._is_complete:
            return all(bool(torch.isfinite(_dense(grad)).all()) for grad in grads)
        samples = []
        for grad in grads[:: -(-len(grads) // _MOST_LOOKED_AT)]:
            values = sparse_values(grad) if grad.is_sparse else grad
            samples.append((values if values.dim() < 2 else values.select(-1, 0)).reshape(-1))
        return bool(torch.isfinite(torch.cat(samples)).all())

    def _look_later(
        self, step: int, grads: list[Tensor], losses: Sequence[Loss], norm: Tensor | None
    ) -> Tensor:
        if norm is None:
            norms = foreach_norm([_dense(grad) for grad in grads])
            norm = torch.stack([each.float() for each in norms]).sum()
        is_bad = torch.isfinite(norm).logical_not()
        self._pending = _Looked(HostCopy(is_bad), step, losses, self._membership.generation)
        return is_bad

    def _raise(self, step: int, losses: Sequence[Loss], *, is_alone: bool = False) -> None:
        mine = [
            [loss.shard, str(value), list(loss.samples[:_SAMPLES_SHOWN])]
            for loss in losses
            if not math.isfinite(value := loss.value.item())
        ]
        members = self._membership
        everyone: list[Any] = [[]] * members.rank + [mine]
        if members.size > 1 and not is_alone:
            what = "Asking whose loss is not finite"
            everyone = exchange(members.group, mine, members.word_device, what)
        before = "one of the steps before" if self.is_late else f"step {step - 1}"
        state = f"The model is as it was after {before}"
        state += "; the last checkpoint is good." if self._is_saved else "."
        for rank, theirs in zip(members.numbers, everyone, strict=False):
            if theirs:
                number, value, samples = theirs[0]
                text = f"Step {step}: the loss of shard {number}, on rank {rank}, is {value}."
                if samples and samples[0] >= 0:
                    more = "…" * (len(samples) == _SAMPLES_SHOWN)
                    text += f" Its samples are {', '.join(map(str, samples))}{more}."
                raise NotFiniteError(
                    text,
                    state,
                    "Look at these samples; if they are good, lower the learning rate or set "
                    "clip_norm.",
                    rank=rank,
                )
        grads = [(name, p.grad.to_dense()) for name, p in self._named if p.grad is not None]
        bad = [f" of {name!r}" for name, grad in grads if not torch.isfinite(grad).all()]
        if is_alone:
            raise NotFiniteError(
                f"Step {step}: a gradient was not finite, or a loss of another worker.",
                state,
                "Lower the learning rate or set clip_norm.",
            )
        raise NotFiniteError(
            f"Step {step}: the losses are finite, but the gradient{''.join(bad[:1])} is not.",
            state,
            "Look for a square root, a logarithm or a division near zero, or set clip_norm.",
        )


def total_norm(grads: Iterable[Tensor | None]) -> Tensor:
    """The length of all gradients together, also of sparse ones, of which torch has no norm."""
    there = [grad for grad in grads if grad is not None]
    return nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in there])


def _dense(grad: Tensor) -> Tensor:
    return sparse_values(grad) if grad.is_sparse else grad


# Note [What is looked at]
# Reading every gradient costs a few percent of a step on a CPU, where memory is slow. The gradient
# of a weight matrix is a product with the gradient that came from above, so one NaN there makes
# a whole row of it NaN, and one element of every row tells. What has fewer than two dimensions is
# read completely. A NaN that is born in single elements of an embedding, in a layer with nothing
# below it, is found a step later by its loss; `check_finite="all"` finds it at once.
