"""How many samples go through a model at once: a whole shard, or pieces where memory is short.

    a worker runs out of memory --> its part of the sum is zeros, and a word in the trailer
                                --> all workers discard the step, and halve the size of a piece
                                --> the same step again, every shard in such pieces

The pieces of a shard are shards of their own: weighed by their samples they add up to its gradient.
Which size is next is a function of the step's number and of sizes that did not fit, so that all
workers have the same one; it is kept with the state of the run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline import env
from paceline.data import Portion, Shard
from paceline.ddp import DistributedDataParallel
from paceline.errors import FitError, UsageError, check_choice, check_whole, message_of, name_ranks
from paceline.group import (
    Membership,
    children_of,
    exchange,
    find_tensors,
    is_container,
    with_children,
)
from paceline.telemetry import Message
from paceline.torch_private import BatchNorm, NormBase
from paceline.update import WholeUpdate

if TYPE_CHECKING:
    from paceline.run.config import RunConfig
    from paceline.run.parts import Training
    from paceline.run.recovery import Recovery

CALM_STEPS = 300
"""After so many steps in a row that fit, pieces twice as large are tried; once, if they do not."""
_TEXTS = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)
"""How errors of other classes say that memory ran out."""
_PLAIN = (str, bytes, bool, type(None))
"""What is the same for every sample of a batch."""
_TALKS = "the model, the loss or the script calls a collective in the pass of a shard"
_APART = "Call it outside of the loop over step.batches(), or use step.joint(); or a smaller batch."
_SHARDS = "Pass more shards= to a new run: each is then smaller, and computed as a whole."


@dataclass(frozen=True, slots=True)
class ShardPiece(Shard):
    """Some neighbouring samples of a shard, which go through the model at once."""

    piece: int = 0
    """Which piece of the shard."""
    start: int = 0
    whole: Shard | None = None

    @property
    def key(self) -> tuple[int, ...]:
        return self.number, self.piece


class Fields(set[str]):
    """Where in batches a list is known to hold fields and not samples: it had another length.

    Where torch has put them together every list does.
    """

    has_all = False

    def __contains__(self, path: object) -> bool:
        return self.has_all or super().__contains__(path)


class Fit:
    """The size of a piece, as all workers have agreed on it.

        whole shards --(out of memory)--> half of it --> ... --> one sample --> the run ends
                     <--(CALM_STEPS)----- twice as much, if that has not failed twice

    Invariant: between two steps it is the same on all workers. In an evaluation, in which workers
    need nothing of each other until the end, each has a size of its own.
    """

    def __init__(
        self,
        wanted: str | int,
        module: nn.Module,
        members: Membership,
        device: torch.device,
        global_batch: int,
    ) -> None:
        self.is_on = wanted != "off"
        self.is_explicit = False
        self._most = wanted if isinstance(wanted, int) else None
        self.size = self._most
        """How many samples a piece has at most; None: a shard is computed as a whole."""
        self.of_evaluation: int | None = None
        self.is_short = False
        """Whether memory ran out in the step under way, as all workers know."""
        self.fields = Fields()
        self.tell: Callable[[Message], None] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None
        """Called when the size is another one."""
        self.passes: Callable[[], int] = lambda: 1
        """How many a step has, on all workers together, in whole shards."""
        self._global_batch = global_batch
        self._members, self._device = members, device
        self._norms = [pair for pair in module.named_modules() if isinstance(pair[1], NormBase)]
        self._since = 0
        """The step from which on it has this size."""
        self._trial = self._ceiling = 0
        """The size that is tried again, and the smallest one that has failed when it was."""
        self._failed: list[int] = []
        self._reason = ""
        """What this worker ran out of memory with, until the others know."""
        self.talks = False
        """Whether a pass of this worker was seen to call a collective of the script's own."""

    def attach(self, engine: Any) -> None:
        """Have the engines tell in time when memory runs out on a worker."""
        for each in getattr(engine, "engines", {"": engine}).values():
            if isinstance(each, DistributedDataParallel):
                each.reducer.agreement.is_awaited = True
            elif not hasattr(each, "run_short"):
                if self.is_explicit:
                    raise UsageError(
                        f"fit= was passed, and the engine {type(each).__name__} "
                        "has no run_short(), with which a worker tells the others.",
                        advice='Pass fit="off", or give it one; see paceline.ddp.NaiveEngine.',
                    )
                self.is_on = False

    def state_dict(self) -> dict[str, Any]:
        names = ("size", "since", "trial", "ceiling", "failed")
        values = (self.size, self._since, self._trial, self._ceiling, self._failed)
        return dict(zip(names, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.is_on:
            return
        sizes = [size for size in (state["size"], self._most) if size is not None]
        self.size = min(sizes, default=None)
        self._since, self._trial, self._ceiling = state["since"], state["trial"], state["ceiling"]
        self._failed = list(state["failed"])
        self.on_change()

    def hear(self, error: RuntimeError, loss: Tensor | None = None) -> None:
        """A sum, or a backward pass, has failed: raise, unless another worker ran out of memory."""
        if self.is_on and isinstance(error, FitError):
            self.is_short = True
            return
        if loss is not None and self.takes(error):
            with suppress(RuntimeError):  # of a view
                loss.detach_()  # the script holds it, and with it what is left of the graph
        raise error

    def take_part(self, training: Training) -> None:
        """Take part in a sum at the end of the step, as a worker without shards does."""
        try:
            training.engine.take_part()
        except FitError as error:
            self.hear(error)
        if isinstance(training.update, WholeUpdate):
            training.update.note_grads()

    def run_short(
        self, error: BaseException | None, training: Training, recovery: Recovery
    ) -> bool:
        """Whether memory ran out in the passes of this worker, and it was not too late to tell.

        All workers know then, unless one has died meanwhile.
        """
        if error is None or not self.takes(error):
            return False
        if self.talks:  # the others may be in that collective: they hear when this worker ends
            error.add_note(f"Shards are not computed in pieces, because {_TALKS}. {_APART}")
            return False
        self.release(error)
        training.update.abandon()
        told: list[bool] = []
        since_s, end_s = time.monotonic(), env.read_observation().stall_end_s
        self.is_short = recovery.holds(lambda: told.append(training.engine.run_short()))
        if not self.is_short and 0 < end_s <= time.monotonic() - since_s:
            raise FitError(
                f"This worker ran out of memory, and waited {end_s:.3g} s to tell the others: "
                f"{self._reason}",
                f"They did not come to the sum of their gradients, which is so where {_TALKS}.",
                _APART,
            ) from error
        # Empty where another worker died meanwhile: the step is lost on all of them.
        return told != [False]

    def takes(self, error: BaseException | None) -> bool:
        """Whether the error says that memory ran out, and something is done about that here."""
        if not self.is_on or not isinstance(error, RuntimeError):
            return False
        text = message_of(error)
        return isinstance(error, torch.OutOfMemoryError) or any(each in text for each in _TEXTS)

    def release(self, error: BaseException) -> None:
        """Let go of what the failed pass has allocated; the error is told to the others later."""
        self._reason = message_of(error).partition("\n")[0][:200] or type(error).__name__
        found: BaseException | None = error
        while found is not None:
            # The frames of the failed pass hold its activations.
            traceback.clear_frames(found.__traceback__)
            found = found.__cause__ or found.__context__
        self._empty_cache()

    def _empty_cache(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()

    def usual_rows(self) -> int:
        """How many samples a shard has in most steps."""
        return -(-self._global_batch // self.passes())

    def _grow(self, step: int) -> None:
        """A step begins: try larger pieces, if it is time."""
        rows = self.usual_rows()
        size, most = self.size or rows, self._most or rows
        larger = min(2 * size, most)
        is_calm = step - self._since >= CALM_STEPS
        if size >= most or not is_calm or 0 < self._ceiling <= larger:
            return
        self._trial, self._since = larger, step
        self.size = larger if larger < rows else None
        self.on_change()
        text = f"Step {step}: memory has sufficed for {CALM_STEPS} steps, so pieces of {larger} "
        text += "samples are tried."
        self.tell(Message(text, "info", "fit", {"step": step, "piece": larger, "text": text}))

    def shrink(self, step: int, samples: int, busy: int) -> None:
        """Agree on smaller pieces of the `busy` shards of a step; raises where there are none."""
        members, self.is_short = self._members, False
        rows = -(-samples // min(self.passes(), busy))
        what = f"Step {step}: asking who ran out of memory"
        reasons = exchange(members.group, self._reason, members.word_device, what)
        self._reason = ""
        self._empty_cache()
        short = [rank for rank, reason in enumerate(reasons) if reason]
        failed, is_first = min(self.size or rows, rows), not self._failed
        self._failed = sorted({*self._failed, failed}, reverse=True)
        text = f"Step {step}: {name_ranks(short or [members.rank])} ran out of memory with "
        text += f"{failed} of {rows} samples" if failed < rows else f"shards of {rows} samples"
        text += f": {reasons[short[0]].rstrip('.')}." if short else "."
        if failed == 1:
            raise FitError(
                f"{text} A single sample does not fit.",
                f"Tried were pieces of {', '.join(map(str, self._failed))}.",
                "Use a smaller model or shorter samples, precision='bf16', gradient checkpointing, "
                "or a device with more memory; see docs/memory.md.",
            )
        self.refuse_statistics(text)
        if self._trial and step - self._since < CALM_STEPS:
            self._ceiling = self._trial
        self._trial = 0
        self.size, self._since = -(-failed // 2), step
        self.on_change()
        text += f" The step is done again, every shard in pieces of at most {self.size} samples, "
        text += "with the same gradients."
        if is_first:
            text += " Random numbers are drawn for each piece: dropout has others than without."
        facts = {"step": step, "piece": self.size, "ranks": short, "text": text}
        self.tell(Message(text, "warning", "fit", facts))

    def refuse_statistics(self, what: str = "") -> None:
        """Raise if a layer computes something over the samples of a shard."""
        for name, layer in self._norms:
            # Without running statistics it takes those of the batch in eval() as well.
            is_over_batch = isinstance(layer, BatchNorm) and layer.running_mean is None
            if is_over_batch or (layer.training and layer.track_running_stats):
                raise UsageError(
                    what or f"Shards are to be computed in pieces of {self.size} samples.",
                    f"The layer {name!r} is a {type(layer).__name__} in training mode, whose "
                    "statistics are over all samples of a shard: those of a piece are others.",
                    f"{_SHARDS} Or use GroupNorm, or call eval() on the layer.",
                )

    def cut(self, portion: Portion) -> list[Shard]:
        """Its shards, each in pieces of nearly equal sizes where it is larger than one."""
        self._grow(portion.step)
        size = self.size
        pieces: list[Shard] = []
        for shard in portion.shards:
            rows = len(shard.indices)
            count = 1 if size is None else -(-rows // size)
            if count == 1:
                pieces.append(shard)
                continue
            borders = [rows * number // count for number in range(count + 1)]
            for number, (start, stop) in enumerate(pairwise(borders)):
                place = shard.step, shard.epoch, shard.number
                indices = shard.indices[start:stop]
                pieces.append(ShardPiece(*place, indices, shard.is_second, number, start, shard))
        if len(pieces) > len(portion.shards):
            self.refuse_statistics()
        return pieces

    def load(self, load: Callable[[Shard], Any], pieces: Iterable[Shard]) -> Iterator[Any]:
        """The batch of each; that of a shard in pieces is loaded with the first of them."""
        batch = None
        for piece in pieces:
            if not isinstance(piece, ShardPiece):
                yield load(piece)
                continue
            assert piece.whole is not None
            batch = load(piece.whole) if piece.piece == 0 else batch
            yield self._take(batch, piece.whole.indices, piece.start, len(piece.indices))

    def evaluate(
        self, score: Callable[[int, Any], Any], batch: Any, rows: int
    ) -> Iterator[tuple[int, Any]]:
        """What `score(start, part)` gives for the parts of a batch, each with how many rows."""
        start = 0
        while start < rows:
            size = min(self.of_evaluation or rows, rows)
            count = min(size, rows - start)
            try:
                part = batch if size == rows else self._take(batch, range(rows), start, count)
                found = score(start, part)
            except RuntimeError as error:
                if not self.takes(error):
                    raise
                self.release(error)
                if size == 1:
                    what = f"run.evaluate(): a single sample does not fit: {self._reason}"
                    raise FitError(what, advice="See docs/memory.md.") from error
                self.of_evaluation = -(-size // 2)
                text = f"run.evaluate() ran out of memory with {size} samples, and continues with "
                text += f"{self.of_evaluation} at a time: {self._reason}"
                self.tell(Message(text, "warning"))
                self._reason = ""
                continue
            yield count, found
            start += count

    def _take(self, batch: Any, samples: Sequence[int], start: int, count: int) -> Any:
        return take_rows(batch, len(samples), start, start + count, self.fields)


def take_rows(
    value: Any, rows: int, start: int, stop: int, fields: Fields, path: str = "batch"
) -> Any:
    """Some samples of a batch of `rows`: in the same containers, these rows of every tensor.

    Refuses what may belong to all of them: a number would be counted once per piece.
    """
    is_array = isinstance(value, Tensor) or hasattr(value, "__array__")
    if is_array and value.ndim and len(value) == rows:
        return value[start:stop]
    if isinstance(value, _PLAIN):
        return value
    problem = f"{path} is of the type {type(value).__name__}"
    if is_array:
        problem = f"{path} has the shape {tuple(value.shape)}"
    elif isinstance(value, int | float):
        problem = f"{path} is {value!r}"
    elif isinstance(value, list | tuple) and len(value) == rows:
        tensors = list(find_tensors(value))
        has_columns = all(tensor.ndim and len(tensor) == rows for tensor in tensors)
        if tensors and path in fields:
            return _map(value, rows, start, stop, fields, path)
        if not tensors or not has_columns:
            return value[start:stop]  # one item per sample
        problem = f"{path} may be a list of {rows} samples, or of {rows} fields"
    elif is_container(value) and not isinstance(value, set | frozenset):
        fields.add(path)
        return _map(value, rows, start, stop, fields, path)
    raise UsageError(
        f"A batch of {rows} samples cannot be cut into pieces: {problem}, so it is not known which "
        "part of it belongs to which sample.",
        advice=f"Let the collate function return tensors with a row per sample. {_SHARDS}",
    )


def _map(value: Any, rows: int, start: int, stop: int, fields: Fields, path: str) -> Any:
    children = [
        take_rows(item, rows, start, stop, fields, path + key) for key, item in children_of(value)
    ]
    return with_children(value, children)


def check_fit(value: Any) -> None:
    """Refuse an option that is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        check_whole("fit", value)
    else:
        check_choice("fit", value, ("auto", "off", None))


def make_fit(
    config: RunConfig, folder: str, module: nn.Module, members: Membership, device: torch.device
) -> Fit:
    """What the options ask for: by default, pieces where the model is on an accelerator.

    With a `folder` it is written there what each size of a piece costs.
    """
    wanted = asked = config.options.fit
    causes = {}
    if folder:
        wanted = asked = config.global_batch
    if config.options.same_bits:
        causes["same_bits"] = "and the bits of a shard would depend on a worker's memory"
    if config.has_sync_norm:
        causes["SyncBatchNorm"] = "whose statistics are over the samples of all workers"
    for name, why in causes.items():
        if wanted not in (None, "off"):
            raise UsageError(
                f"fit={wanted!r} was passed together with {name}, {why}.", advice=_SHARDS
            )
    if wanted is None:
        # Out of the host's memory the kernel kills the process: there is no error to hear of.
        wanted = "off" if causes or device.type == "cpu" else "auto"
    kind: Any = Fit
    if folder:  # `paceline fit` has started this
        from paceline.run.measured_fit import MeasuredFit

        kind = partial(MeasuredFit, Path(folder))
    fit: Fit = kind(wanted, module, members, device, config.global_batch)
    fit.is_explicit = asked is not None
    fit.fields.has_all = config.loader is None and config.options.collate_fn is None
    return fit
