"""When islands pay: the time of a step with summed gradients, and of a step on islands.

    every step     a ring all-reduce of n workers sends 2(n-1)/n of the gradients over every link
    every round    each island sends its packed difference to the meeting place, and gets those of
                   n-1 others; the link of the meeting place carries all of that

Arithmetic that needs no torch. It does not predict the quality of the model: training on islands is
a different algorithm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.errors import UsageError, check_whole
from paceline.islands.options import Islands
from paceline.telemetry import bytes_text, seconds_text

PAYS_FROM = 1.2
"""From this speed-up on islands are worth considering, as they change the training."""
SUGGESTED = Islands(bits=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A step of the same samples, computed both ways."""

    islands: int
    options: Islands = SUGGESTED
    step_bytes: float
    """What a worker sends in a step with summed gradients."""
    round_bytes: float
    """What an island sends in a round."""
    bytes_per_s: float
    together_s: float
    apart_s: float

    @property
    def gain(self) -> float:
        """How many times as fast a step is on islands."""
        return self.together_s / self.apart_s

    @property
    def pays(self) -> bool:
        return self.gain >= PAYS_FROM

    @property
    def sentence(self) -> str:
        text = (
            f"At {bytes_text(self.bytes_per_s)}/s between {self.islands} islands, adding up "
            f"gradients sends {bytes_text(self.step_bytes)} in every step, which takes "
            f"{seconds_text(self.together_s)}; {self.settings} sends "
            f"{bytes_text(self.round_bytes)} in {self.options.every} steps, and a step takes "
            f"{seconds_text(self.apart_s)}: {self.gain:.3g} times as fast. "
        )
        if self.pays:
            text += "Islands pay, but change the training: use a learning rate that warms up and "
            return text + "falls, and see docs/islands.md."
        return text + "Islands do not pay here."

    def as_json(self) -> dict[str, Any]:
        more = {"gain": self.gain, "pays": self.pays, "text": self.sentence}
        return {**asdict(self), "options": self.settings, **more}

    @property
    def settings(self) -> str:
        """The options as code, to pass to a run."""
        return f"Islands(every={self.options.every}, bits={self.options.bits})"


def forecast_islands(
    *,
    step_s: float,
    parameters: float,
    bytes_per_s: float,
    latency_s: float = 0.0,
    islands: int = 2,
    exchange_s: float | None = None,
) -> Forecast:
    """Compare both ways for `parameters` in fp32 and a step that takes `step_s` to compute.

    `exchange_s` is the time that the sums add to a step, if known; else no overlap is assumed.
    """
    check_whole("islands", islands, 2)
    for name, value in (
        ("step_s", step_s),
        ("parameters", parameters),
        ("bytes_per_s", bytes_per_s),
    ):
        if not 0 < value < 1e30:
            raise UsageError(f"{name} is {value!r}.", advice="Pass a number above 0.")
    others = islands - 1
    step_bytes = 2 * others / islands * 4 * parameters
    if exchange_s is None:
        exchange_s = 2 * others * latency_s + step_bytes / bytes_per_s
    round_bytes = SUGGESTED.bits / 8 * parameters
    # Into the meeting place, and out again to each of the others.
    round_s = (others + others * others) * round_bytes / bytes_per_s + 2 * latency_s
    return Forecast(
        islands=islands,
        step_bytes=step_bytes,
        round_bytes=round_bytes,
        bytes_per_s=bytes_per_s,
        together_s=step_s + exchange_s,
        apart_s=step_s + round_s / SUGGESTED.every,
    )
