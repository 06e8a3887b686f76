"""A rank that trains a model which is not wrapped, while the others wait for it.

    the others   leave word in the group's store while they wrap, and while they first sum
    that rank    notices in steps of its optimizer that the word stays there, and raises

Only until the first gradients of a process are averaged: a rank that trains alone later on, such as
a probe for an evaluation, does so on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist

from paceline import env
from paceline.errors import DesyncError
from paceline.group import Membership
from paceline.telemetry import follow_optimizers

WINDOW_S = 120.0
"""As long as `paceline run` waits before it speaks of a stall, unless told otherwise."""
LOOK_S = 1.0
WRAPPING, AVERAGING = "to wrap its model", "to average gradients"
_KEY = "paceline/waits"
_NOTHING = nullcontext()


class Loner:
    """Looks at the steps of optimizers until this process has averaged gradients."""

    def __init__(self) -> None:
        self._steps = 0
        self._looked_s = 0.0
        self._word = ""
        """What another rank has left, since `_since_s`."""
        self._since_s = 0.0
        self.is_done = False
        """Gradients are averaged here, or there is no other rank to average with."""
        self._stop = follow_optimizers(self._on_step, after=True)

    def waits(self, membership: Membership, what: str) -> AbstractContextManager[None]:
        """Inside, this rank waits for all others before it can train."""
        if self.is_done or not dist.is_initialized():
            return _NOTHING
        return self._waits(membership.group, what)

    @contextmanager
    def _waits(self, group: Any, what: str) -> Iterator[None]:
        world: Any = dist.group.WORLD
        # Ranks outside of a smaller group train by themselves on purpose.
        store = world.get_group_store() if group is world else None
        if store is not None:
            store.set(_KEY, f"rank {group.rank()} waits for it {what}")
        try:
            yield
        finally:
            with suppress(Exception):  # the store may be gone with the process that served it
                if store is not None:
                    store.set(_KEY, "")  # deleted, it could go while another rank asks for it
        if what == AVERAGING:
            self.is_done = True
            self._stop()

    def _on_step(self, _optimizer: object) -> None:
        if self.is_done or torch.compiler.is_compiling():
            return
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._steps += 1
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s, word = now_s, ""
        with suppress(Exception):
            world: Any = dist.group.WORLD
            store = world.get_group_store()
            # Asked for first: `get` would wait for a key that is not there.
            word = store.get(_KEY).decode() if store.check([_KEY]) else ""
        if word != self._word:
            self._word, self._since_s, self._steps = word, now_s, 0
        window_s = env.read_observation().stall_s or WINDOW_S
        if word and now_s - self._since_s >= window_s and self._steps > 1:
            raise DesyncError(
                f"Rank {dist.get_rank()} has stepped an optimizer {self._steps} times in "
                f"{window_s:.0f} s for itself, while {word}.",
                advice="Wrap the model on every rank, and train the wrapped one. If this rank is "
                "to train something alone first, let the others wait at dist.barrier().",
            )


LONER = Loner()
