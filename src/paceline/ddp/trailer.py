"""What ranks tell each other in a step: the trailer behind the last bucket's gradients.

One message carries all of it, because each element is a number whose sum over the ranks means
something. Whatever does not fit together is an error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.ddp.buffer import ParamRef
from paceline.ddp.checks import check_in_sync, check_modes
from paceline.ddp.fingerprint import (
    DATASET_STEP,
    EVERY,
    LARGEST_SIZE,
    LENGTH,
    Fingerprint,
    InputCheck,
    is_different,
)
from paceline.errors import DesyncError, FitError
from paceline.group import HostCopy, Membership, refuse_lost, runs_ahead
from paceline.transport import mean_factor

if TYPE_CHECKING:
    from paceline.ddp.backward import Backward
    from paceline.ddp.weight import LossWeight


class Words(NamedTuple):
    """The elements of the trailer after the flags."""

    weight: float = 1.0
    votes: float = 0.0
    aborts: float = 0.0
    short: float = 0.0
    news: float = 0.0
    weighed: float = 0.0
    plain: float = 1.0
    label: float = 0.0


CONTROL_WORDS = len(Words._fields) + LENGTH
"""Elements of the trailer after the flags."""


class Trailer:
    """What ranks must agree on in a step, written behind the last bucket's gradients.

        gradients ... | used_0 ... used_n-1 | weight | votes | aborts | short
                      | news | weighed | plain | label | fingerprint

    Each element is a number whose sum over the ranks means something, so one message carries all:

    - `used_i`: how many ranks have a gradient for parameter i. None: its `grad` stays `None`.
    - `weight`: how many items (samples, tokens; 1 by default) the summed gradients are sums over.
    - `votes`: how many ranks found a parameter that was frozen before and now wants gradients.
    - `aborts`: how many ranks broke off this backward half-way.
    - `short`: how many ranks ran out of memory, so that none applies the step.
    - `news`: how many ranks have something to tell the others; see `Engine.has_news`.
    - `weighed`, `plain`: how many ranks' losses were inside `weighted()`, and how many were not.
    - `label`: which model and step this is; all ranks must have sent the same.
    - `fingerprint`: of some of the parameters, in the first steps of what ranks train on; see
      `fingerprint`. Zeros in most steps.
    """

    def __init__(self, params: int, dtype: torch.dtype, device: torch.device) -> None:
        self._params = params
        # Nearly every trailer says "all used, weight 1, nothing else": one copy, prepared once.
        plain = [1.0] * params + [*Words(), *[0.0] * (CONTROL_WORDS - len(Words()))]
        self._plain = torch.tensor(plain, dtype=dtype, device=device)

    def write(
        self, target: Tensor, unused: Sequence[int], words: Words, fingerprint: Tensor | None = None
    ) -> None:
        target.copy_(self._plain)
        label = self._params + len(words) - 1
        if not unused and words == Words(label=words.label):
            target[label].fill_(words.label)
        else:
            flags = [1.0] * self._params
            for index in unused:
                flags[index] = 0.0
            target[: label + 1].copy_(torch.tensor([*flags, *words], dtype=target.dtype))
        if fingerprint is not None:
            target[label + 1 :].copy_(fingerprint)

    def words(self, source: Tensor) -> Tensor:
        """The sums of the words, and of the fingerprints after them."""
        return source[self._params :]

    def used(self, source: Tensor) -> list[bool]:
        return [count > 0 for count in source[: self._params].tolist()]


class Agreement:
    """What one model's trailers say, step by step: written before the last sum, read after it."""

    def __init__(self, membership: Membership, params: Sequence[ParamRef]) -> None:
        self.identity = 0
        """The same on every rank, another for every model."""
        self.compares = True
        """Whether fingerprints of the parameters are sent, and compared."""
        self.is_awaited = False
        """Whether a rank may run short of memory, so that the host waits for every step's words."""
        self.announces = False
        """Whether this rank says in its next trailer that it has news."""
        self.has_news = False
        """Whether a rank said so in the last trailer that has reached the host."""
        self.inputs = InputCheck()
        self.is_training: Callable[[], bool] = lambda: True
        """Whether this rank's model is in training mode."""
        self._membership = membership
        self._size = membership.size
        self._params = params
        self._fingerprint: Fingerprint | None = None
        self._taken: tuple[int, Tensor | None] = (-1, None)
        """The step of the last fingerprint, and that."""
        self._late_words: HostCopy | None = None

    def on_generation(self) -> None:
        """Forget what the ranks of another group said."""
        self._size, self._late_words = self._membership.size, None
        self._taken = -1, None

    def write(
        self,
        trailer: Trailer,
        target: Tensor,
        current: Backward,
        step: int,
        weight: LossWeight,
        *,
        votes: bool,
        is_joined: bool,
    ) -> None:
        """Say what this rank has to say; one that only keeps company has no fingerprint."""
        counts = not current.is_shadow  # one that only keeps company has no losses
        fate = current.is_aborting, current.is_short, self.announces
        kinds = counts and weight.is_set, counts and not weight.is_set
        said = weight.value, votes, *fate, *kinds, self._label(step)
        words = Words._make(map(float, said))
        fingerprint = None
        if 1 < self._size <= LARGEST_SIZE and counts and not is_joined:
            if 0 < step <= DATASET_STEP:
                fingerprint = self.inputs.words(step, target.device)
            else:
                fingerprint = self.take_fingerprint(step, target.device)
        trailer.write(target, current.unused, words, fingerprint)

    def take_fingerprint(self, step: int, device: torch.device) -> Tensor | None:
        """Of the parameters as they are when this is first called in a step, if it has one.

        That is in a forward pass under `no_sync()`, if there is one: between that and the average
        each rank may move its own parameters for a while, as SAM does.
        """
        is_due = self.compares and 1 < self._size <= LARGEST_SIZE and step % EVERY == 0 < step
        if is_due and self._taken[0] != step:
            self._fingerprint = self._fingerprint or Fingerprint(self._params, device)
            words = self._fingerprint.words(step, is_training=self.is_training())
            self._taken = step, words
        return self._taken[1] if is_due else None

    def _label(self, step: int) -> float:
        """Which model and which step this is, as a number small enough to be summed exactly."""
        # At most 4,096: in float32 the sum over `LARGEST_SIZE` ranks is exact.
        return float(1 + self.identity % 64 * 64 + step % 64)

    def read(self, words: Tensor, step: int, *, waits: bool) -> tuple[Tensor | float, bool]:
        """What turns sums divided by the size into averages, and whether any were unfrozen.

        Raises if a rank has broken off, ran out of memory, was at another model or step, or has
        other parameters.
        The host waits for a device only if it `waits`: else it looks at the words a step later.
        """
        size = self._size
        is_late = not words.is_cpu and runs_ahead(words.device)
        if is_late:
            self._read_late(words, step)
            if not (waits or self.is_awaited):
                return size / words[0], False
        total, votes, aborts, short, news, weighed, plain, labels, *fingerprints = words.tolist()
        if is_late:
            fingerprints = [0.0]  # they are looked at a step later
        else:
            self.has_news = news > 0
        is_mixed = weighed and plain
        if aborts or is_mixed or labels != self._label(step) * size or fingerprints[0]:
            self._refuse(aborts, weighed, plain, labels, fingerprints, step, words.device)
        if short:
            raise FitError(f"Step {step}: {short:.0f} of {size} ranks ran out of memory.")
        return 1.0 if total == size else mean_factor(size, total), bool(votes)

    def _read_late(self, words: Tensor, step: int) -> None:
        """Look at last step's words, which have reached the host by now, and send for these."""
        late, self._late_words = self._late_words, None
        self.has_news = False
        if late is not None:
            _, _, aborts, _, news, weighed, plain, _, *fingerprints = late.read().tolist()
            self.has_news = news > 0
            labels = self._label(step) * self._size  # theirs were another step's
            self._refuse(aborts, weighed, plain, labels, fingerprints, step, words.device, late=1)
        self._late_words = HostCopy(words)

    def _refuse(
        self,
        aborts: float,
        weighed: float,
        plain: float,
        labels: float,
        fingerprints: Sequence[float],
        step: int,
        device: torch.device,
        late: int = 0,
    ) -> None:
        """Raise if the words, which are those of `late` steps ago, do not fit together."""
        does_not_fit = aborts or labels != self._label(step) * self._size or (weighed and plain)
        # Where NCCL has lost a peer, its sums end with anything in memory: no rank has sent such
        # words.
        if does_not_fit and runs_ahead(device):
            refuse_lost(self._membership.group, f"Step {step}: the sum of the trailer")
        if aborts:
            raise DesyncError(
                f"Step {step}: {aborts:.0f} of {self._size} ranks broke off their backward.",
                advice="Look for the first error on the other ranks.",
            )
        if labels != self._label(step) * self._size:
            raise DesyncError(
                f"Step {step}: rank {self._membership.rank} averaged gradients with ranks "
                "that were at another step or at another model.",
                advice="Run the backward passes of all models in the same order on every rank, "
                "and as many of them.",
            )
        if weighed and plain:
            raise DesyncError(
                f"Step {step}: {weighed:.0f} of {self._size} ranks weighed their losses, and "
                f"{plain:.0f} did not, so their sum means nothing.",
                advice="Put the backward of every rank into model.weighted(count), or of none; a "
                "rank without items has weighted(0).",
            )
        if fingerprints[0] and (step - late) % EVERY:
            leads = self._membership.rank == 0
            self.inputs.read(step - late, fingerprints, self._size, warns=leads)
        elif fingerprints[0] and is_different(fingerprints):
            check_modes(self._membership.group, self.is_training(), device, step)
            found = ((ref.name, ref.get()) for ref in self._params)
            named = [(name, param) for name, param in found if param is not None]
            check_in_sync(self._membership.group, named, device, step)  # says what differs, and who
