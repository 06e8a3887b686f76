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

from paceline import comm
from paceline.run.late import Late

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

    On a GPU without a way around it, what was added up is known one step later.
    """

    def __init__(self, group: Any, word_device: torch.device) -> None:
        self._group, self._device = group, word_device
        self._size = group.size()
        self._next = 0
        self._last_s = time.monotonic()
        self._last_step = 0
        self._on_its_way: tuple[int, Late] | None = None

    def hold(self, step: int, wishes: Wishes) -> Wishes:
        """Say what this worker wants after `step`; what all of them want, where it is time."""
        if self._size == 1:
            return wishes
        agreed = Wishes()
        if self._on_its_way is not None:
            agreed = self._read(step)
        if step >= self._next and self._on_its_way is None and not any(agreed):
            now_s = time.monotonic()
            step_s = (now_s - self._last_s) / max(1, step - self._last_step)
            self._last_s, self._last_step = now_s, step
            words = torch.tensor([*wishes, step_s], dtype=torch.float32, device=self._device)
            comm.all_reduce(self._group, words, f"Step {step}: asking whether to stop")
            self._on_its_way = step, Late(words)
            if self._device.type == "cpu":
                agreed = self._read(step)
        return agreed

    def _read(self, step: int) -> Wishes:
        assert self._on_its_way is not None
        (_, late), self._on_its_way = self._on_its_way, None
        *wishes, seconds = late.read().tolist()
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
