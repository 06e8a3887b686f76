"""Where time goes: the one list of phases, for all that measures, records or draws them."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What a worker does at a moment; the phases of a step add up to the step.

    A phase is equal to its name as a string, so files and older readers need no translation.
    """

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"
    """From the end of a worker's own work until the last worker is ready."""
    TRANSFER = "transfer"
    """From the moment the last worker is ready until the sum has arrived."""
    OPTIMIZER = "optimizer"
    OTHER = "other"

    @property
    def meaning(self) -> str:
        """What the phase is, in words."""
        return _MEANINGS[self]


OWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER)
"""Phases in which a worker does its own work and waits for no other."""
MEASURED = (*OWN, Phase.WAIT)
"""What one worker can measure: its wait lasts until the sum arrives."""

_MEANINGS = {
    Phase.DATA: "fetching samples",
    Phase.FORWARD: "computing outputs and the loss",
    Phase.BACKWARD: "computing gradients",
    Phase.WAIT: "waiting for slower workers",
    Phase.TRANSFER: "exchanging gradients",
    Phase.OPTIMIZER: "updating the weights",
    Phase.OTHER: "the rest of the loop",
}
