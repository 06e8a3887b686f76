"""What can go wrong inside a `Run`, and at which of its moments.

| moment | the worker is |
|---|---|
| `step` | at the beginning of a step, before its first batch |
| `forward` | done with a forward pass of a shard |
| `before the sum`, `between buckets`, `after the last bucket` | in backward: nothing is on its way to the others; some of it is; everything has arrived |
| `before the gather`, `while gathering` | with an update that is shared out: this worker has stepped its share; it is about to give it to whoever saves |
| `in the commit` | between the optimizer's step and the scheduler's |
| `between steps` | past the end of the `with` block, which the others may have reached or not |
| `at the vote` | about to read what all workers want, such as to stop |
| `while evaluating` | done with its part of `run.evaluate()`, which is not added up yet |
| `while saving` | about to give a complete checkpoint its name; only the worker that writes passes here: use `rank=None` |
| `while a group is formed`, `while healing` | with the others after a death, before the new group exists, and before state is handed over |
| `while starting`, `while joining` | a replacement, before it says that it is ready, and after it was let in |
| `after the loop` | past the last step and what the run itself does then, in the rest of the script |
"""  # noqa: E501

from __future__ import annotations

import signal as signals
from typing import Self

from tests.faults.planned import Fault, Faults

OF_STEPS = (
    *("step", "forward", "before the sum", "between buckets", "after the last bucket"),
    *("in the commit", "between steps", "at the vote", "while evaluating", "while saving"),
)
OF_RECOVERY = ("while a group is formed", "while healing", "while starting", "while joining")
AFTER_ALL = "after the loop"
MOMENTS = (*OF_STEPS, *OF_RECOVERY, AFTER_ALL)
"""The points of a training with `Run`. Starting and joining are what replacements do."""
OF_SHARING = ("before the gather", "while gathering")
"""Those that only an update which is shared out passes."""
CUT = "the connections of the default group are shut"
NAN = "the output of the forward pass is NaN"
FULL, STAYS_FULL = "the disk is full once", "the disk is full from now on"
TERMINATE = "the launcher gets SIGTERM"
"""Messages of a `fail` that does something else instead."""


class TrainingFaults(Faults):
    """A plan for a whole training: `planned.Faults` with a few more."""

    __slots__ = ()

    def kill_later(self, *, rank: int | None, step: int, seconds: float) -> Self:
        """SIGKILL so much after the beginning of the step, wherever the worker is then."""
        kill = int(signals.SIGKILL)
        return self._with(action="kill", rank=rank, step=step, signal=kill, seconds=seconds)

    def cut(self, *, rank: int | None, step: int, where: str = "step") -> Self:
        """The connections of the default group are shut, and nobody dies."""
        return self.fail(rank=rank, step=step, where=where, error=CUT)

    def nan(self, *, rank: int | None, step: int) -> Self:
        """A forward pass gives NaN."""
        return self.fail(rank=rank, step=step, where="forward", error=NAN)

    def fill_disk(self, *, step: int, stays: bool) -> Self:
        """There is no room for a checkpoint, or for all later ones either."""
        error = STAYS_FULL if stays else FULL
        return self.fail(rank=None, step=step, where="while saving", error=error)

    def terminate(self, *, rank: int | None, step: int, where: str = "step") -> Self:
        """The launcher gets SIGTERM."""
        return self.fail(rank=rank, step=step, where=where, error=TERMINATE)


def is_late_kill(fault: Fault) -> bool:
    """Whether the fault is one of `TrainingFaults.kill_later`."""
    return fault.action == "kill" and fault.seconds > 0


def kind_of(fault: Fault) -> str:
    """Which of the messages above it has that stand for something else than an exception."""
    is_special = fault.action == "fail" and fault.message in (CUT, NAN, FULL, STAYS_FULL, TERMINATE)
    return fault.message if is_special else fault.action
