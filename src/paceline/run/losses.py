"""What a script passes to `step.backward()` and does before: how it is read, what is refused."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from torch import Tensor

from paceline.errors import PeerError, UsageError, shown
from paceline.telemetry import count_text


def refuse_arguments(unknown: dict[str, Any], reduction: str) -> NoReturn:
    """Raise for arguments that do not exist, or for a reduction that does not."""
    if "weight" in unknown:
        raise UsageError(
            "step.backward() has no weight= any more.",
            advice="Pass a mean as it is, with items= over how many it is where those are not the "
            'samples; or a sum with items=n, reduction="sum".',
        )
    if unknown:
        raise TypeError(f"step.backward() has no argument {next(iter(unknown))!r}.")
    raise UsageError(f"reduction is {reduction!r}.", advice="Use 'mean' or 'sum'.")


def leave_block(step: int) -> NoReturn:
    """Have a step begin again with the first line of its block, where another worker has died.

    A collective of the script's own that stands before the loop has failed on those who waited in
    it, and they leave the block to do it again: so do all workers.
    """
    raise PeerError(f"Step {step} begins again: the script has talked to workers in it.")


def refuse_outside_block(step: int, what: str) -> NoReturn:
    """Raise for a step that is used without `with step:`."""
    raise UsageError(
        f"Step {step}: step.{what}() was called without `with step:`.",
        advice="Write `with step:` inside `for step in run:` and indent what belongs to the step: "
        "the end of the block applies it.",
    )


def refuse_loop(step: int, what: str, *, is_entered: bool) -> NoReturn:
    """Raise for a second loop over the batches of a step, or one outside of it."""
    if not is_entered:
        refuse_outside_block(step, what)
    raise UsageError(
        f"Step {step}: {what}() is called once, inside `with step:`.",
        advice="Keep the batches in a list to go through them twice.",
    )


def refuse_backward(step: int, *, is_entered: bool) -> NoReturn:
    """Raise for a loss where none is expected."""
    if not is_entered:
        refuse_outside_block(step, "backward")
    raise UsageError(
        f"Step {step}: step.backward() is called once per batch, inside the loop over "
        "step.batches().",
        advice="Add the losses of one batch together first.",
    )


def refuse_loss(step: int, loss: Any) -> NoReturn:
    """Raise for what is not a loss of one element with a graph."""
    what = f"is {shown(loss)}, not a tensor"
    if isinstance(loss, Tensor):
        what = "does not depend on any parameter"
        if loss.numel() != 1:
            what = f"has {loss.numel()} elements"
    raise UsageError(
        f"Step {step}: the loss {what}.",
        advice="Pass the mean that the loss function returned for the output of run.model, "
        "without .item(), detach() and torch.no_grad(), and its items= where those are not the "
        "samples of the batch.",
    )


def note_step(error: BaseException, step: int) -> None:
    """Have an exception say, once, in which step it was raised."""
    note = f"In step {step} of the run."
    if isinstance(error, Exception) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def refuse_some_items(step: int) -> NoReturn:
    """Raise for losses of which some have items."""
    raise UsageError(
        f"Step {step}: items were given for one batch and not for another.",
        advice="Pass items= to every step.backward(), or to none.",
    )


def refuse_missing(step: int, done: int, shards: int) -> NoReturn:
    """Raise for a block that ends before all shards are computed."""
    raise UsageError(
        f"Step {step}: {done} of this worker's {shards} shards were computed.",
        advice="Go through all of step.batches() and call step.backward() for each; to leave the "
        "step out, leave the `with` block by an exception.",
    )


def refuse_no_loss(step: int, shard: int) -> NoReturn:
    """Raise for a batch without a loss."""
    raise UsageError(
        f"Step {step}: there was no step.backward() for shard {shard}.",
        advice="Call step.backward(loss) once per batch, in place of loss.backward(); for a batch "
        "that should not count, with items=0.",
    )


def refuse_turn(step: int, name: str) -> NoReturn:
    """Raise for a turn in a run of one model."""
    raise UsageError(
        f"Step {step}: step.turn({name!r}) was called in a run of one model.",
        advice=f"Pass models by name, Run({{{name!r}: (model, optimizer), ...}}, dataset), or "
        "leave the turn out.",
    )


def refuse_talks(step: int, shards: int, size: int) -> NoReturn:
    """Raise for a collective in the pass of a shard."""
    raise UsageError(
        f"Step {step}: a collective of torch.distributed was called in the pass of a shard, by the "
        f"model, the loss or the script. With {count_text(shards, 'shard')} on "
        f"{count_text(size, 'worker')}, or a last batch too small for all, it sees a part of the "
        "batch that depends on who computes it.",
        advice="Pass shards= the number of workers, with drop_last=True in RunOptions; or call it "
        "outside of the loop over step.batches().",
    )


def read_items(step: int, items: float | Tensor) -> float:
    """How many items a loss is over."""
    try:
        number = float(items)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"Step {step}: items is {shown(items)}; it is how many items the loss is "
            "a mean or a sum over.",
            advice="Pass the number of samples or tokens, from 0 up.",
        )
    return number


# Note [Weights]
# Gradients are summed over the workers and divided by the sum of all weights, which costs a pass
# over them unless that quotient is one. Usually the items are samples, and every worker knows how
# many the global batch has: so losses are multiplied by size / samples beforehand, and the plain
# average over the workers is right. A worker without a shard weighs nothing, because it cannot know
# whether the others weigh items; then the one that has shard 0 brings all the weight there is,
# `size`, so that nothing is left to divide. Where items are given they are scaled alike, and the
# quotient corrects for the difference. In 16 bits the factor of a loss decides how its gradients
# are rounded, and whether they overflow; so there it does not depend on the number of workers.
