"""What the workers agree on between steps: whether to stop, and whether something is new.

A signal reaches one worker or all of them, at different steps; all must leave after the same one.
So now and then, in the same steps everywhere, they add up what each one wants. How often follows
from numbers that are themselves agreed on: about ten times a second, and never every step of a fast
training.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline import comm

PERIOD_S = 0.1
MOST_STEPS = 1000


class Wishes(NamedTuple):
    """The sum over the workers of what each one wants."""

    interrupt: float = 0.0
    """How many were asked to stop by SIGINT."""
    terminate: float = 0.0
    """How many were asked to stop by SIGTERM."""
    buffers: float = 0.0
    """How many have seen a buffer change that nobody thought would."""


class Vote:
    """Adds up wishes in some steps, the same on every worker.

        start, when gradients have arrived --(optimizer)--> result, after the commit

    All workers have just waited for each other when it starts, and the sum travels while they
    update their parameters, so nobody waits for it. Where it has to travel through a GPU, its
    result is read one step later.
    """

    def __init__(self, group: Any, word_device: torch.device) -> None:
        self._group, self._device = group, word_device
        self._size = group.size()
        self._next = 0
        self._last_s = time.monotonic()
        self._last_step = 0
        self._pending: tuple[int, Tensor, comm.Pending] | None = None

    def start(self, step: int, mine: Wishes) -> None:
        """Say what this worker wants, if it is time to."""
        if self._size == 1 or step < self._next or self._pending is not None:
            return
        now_s = time.monotonic()
        step_s = (now_s - self._last_s) / max(1, step - self._last_step)
        self._last_s, self._last_step = now_s, step
        words = torch.tensor([*mine, step_s], dtype=torch.float32, device=self._device)
        what = f"Step {step}: asking whether to stop"
        self._pending = step, words, comm.start_all_reduce(self._group, words, what)

    def result(self, step: int, mine: Wishes) -> Wishes:
        """What all workers want, where that is known; alone, what this one wants."""
        if self._size == 1:
            return mine
        if self._pending is None:
            return Wishes()
        started, words, reduction = self._pending
        if started == step and self._device.type != "cpu":
            return Wishes()
        self._pending = None
        reduction.wait()
        *wishes, seconds = words.tolist()
        step_s = max(seconds / self._size, 1e-6)
        self._next = step + min(MOST_STEPS, max(1, int(PERIOD_S / step_s)))
        return Wishes(*wishes)


def word_device(group: Any, device: torch.device) -> torch.device:
    """Where small messages of the group travel: on the host where it can, so that nobody waits."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return device
    return torch.device("cpu")
