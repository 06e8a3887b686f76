"""How islands train: the options, and which step exchanges which fragment.

    every 30, fragments 3:    step 10  20  30  40 ...      fragment 0 1 2 0 ...
    delay 4:                  an exchange that begins after step 10 is applied after step 14
    last step:                exchanges in flight are applied; then all fragments are exchanged

The schedule is a function of the step's number, so all workers of all islands agree on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from paceline.errors import (
    UsageError,
    check_choice,
    check_number,
    check_whole,
    refuse_unknown_arguments,
)

RISES_TO, RISING_LR = 0.85, 0.9


@refuse_unknown_arguments()
@dataclass(frozen=True, slots=True, kw_only=True)
class Islands:
    """Train on islands that average rarely: a different algorithm from training on all workers.

    `paceline run --island` defines which workers form an island; without it all are one island.
    """

    every: int = 30
    """How many steps an island trains by itself between two rounds."""
    outer: Literal["nesterov", "sgd"] = "nesterov"
    """How the averaged difference since the last round becomes the next common parameters."""
    lr: float | None = None
    """The outer learning rate. None: 0.9 with a momentum that rises, else 1, which without momentum
    assigns the average."""
    momentum: float | None = None
    """The outer momentum, constant. None: for `nesterov` it rises as the learning rate r of the
    islands falls, as 0.85 sqrt(1 - r / highest r so far), and is 0 in the last round; for `sgd` it
    is 0. A constant m makes steps 1 / (1 - m) times as long, so it needs a lower r."""
    fragments: int = 1
    """In how many parts the parameters are exchanged, one after the other, within `every` steps."""
    delay: int = 0
    """How many steps after its start an exchange is applied: it overlaps with computing."""
    bits: Literal[32, 16, 8] = 32
    """Bits per value of differences that are sent; 32: unchanged. The rounding error is added to
    the next difference."""
    timeout_s: float = 60.0
    """How long a round waits for an island after the first one has arrived."""
    at: str = ""
    """This island's number, their count and the meeting place, such as "0/2@host:29500", for
    another launcher; `paceline run --island` sets it otherwise."""

    def __post_init__(self) -> None:
        check_whole("every", self.every)
        check_whole("fragments", self.fragments)
        check_whole("delay", self.delay, 0)
        check_choice("outer", self.outer, ("nesterov", "sgd"))
        check_choice("bits", self.bits, (32, 16, 8))
        if self.lr is not None:
            check_number("lr", self.lr, 0, math.inf, "Pass a number above 0, or None.")
        check_number("timeout_s", self.timeout_s, 0, math.inf, "Pass a number of seconds.")
        if self.momentum not in (None, 0):
            advice = "Pass a number from 0 up and below 1, or None."
            check_number("momentum", self.momentum, 0, 1, advice)
        if self.every % self.fragments:
            raise UsageError(
                f"{self.fragments} fragments do not divide {self.every} steps between two rounds.",
                advice=f"Use a number of fragments that divides every={self.every}.",
            )
        if self.delay >= self.period:
            raise UsageError(
                f"delay is {self.delay}, and the next exchange begins after {self.period} steps.",
                advice=f"Use a delay below every / fragments = {self.period}.",
            )

    @property
    def period(self) -> int:
        """Steps from the exchange of one fragment to that of the next."""
        return self.every // self.fragments

    @property
    def momentum_rises(self) -> bool:
        return self.momentum is None and self.outer == "nesterov"

    @property
    def outer_lr(self) -> float:
        usual = RISING_LR if self.momentum_rises else 1.0
        return usual if self.lr is None else float(self.lr)

    def momentum_at(self, rate: float) -> float:
        """The outer momentum where the learning rate on the islands is this part of its highest."""
        return RISES_TO * math.sqrt(1 - rate) if self.momentum_rises else float(self.momentum or 0)

    @property
    def assigns_average(self) -> bool:
        """Whether the average becomes the next parameters unchanged."""
        return self.outer_lr == 1 and not self.momentum_rises and not self.momentum

    def starts(self, step: int, last: int) -> tuple[int, ...]:
        """The fragments whose exchange begins after `step`; `last` is the run's last step."""
        if step == last:
            return tuple(range(self.fragments))
        if step % self.period:
            return ()
        return ((step // self.period - 1) % self.fragments,)

    def start_landing(self, step: int, last: int) -> int | None:
        """The step after which the exchange began that is applied after `step`, if there is one.

        Only for delayed exchanges: without a delay, and at the last step, an exchange is applied in
        the step where it begins.
        """
        if not self.delay:
            return None
        began = step - self.delay
        if step == last:  # the newest one, if it is still in flight
            began = (last - 1) // self.period * self.period
            return began if began > 0 and began + self.delay >= last else None
        return began if began > 0 and self.starts(began, last) else None

    def is_busy(self, step: int, last: int) -> bool:
        """Whether an exchange begins or is applied after `step`."""
        return bool(self.starts(step, last)) or self.start_landing(step, last) is not None

    def start_before(self, fragment: int, step: int) -> int:
        """The step of a fragment's previous exchange before `step`; 0 before the first."""
        turn = (fragment + 1) * self.period
        return max(0, (step - 1 - turn) // self.every * self.every + turn)
