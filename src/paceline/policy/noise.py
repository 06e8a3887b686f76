"""The gradient noise scale: how large a batch is worth its while.

The gradient of a batch is the true one plus noise, and the noise shrinks with the batch. Their
ratio, the noise scale, is the batch at which both weigh the same: far below it, twice the batch
halves the steps; far above it, twice the batch changes little. It is measured by comparing the
squared length of gradients over few rows with that over many. See Note [Two batch sizes].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HORIZON = 50.0
"""Over about so many measurements the averages reach back."""
_FEWEST = 5
"""Before so many measurements, an estimate is a guess."""
_HELPS_MUCH, _HELPS_LITTLE = 0.4, 0.2


def from_shards(
    shards: int, rows: float, weighted_squares: float, whole_squared: float
) -> tuple[float, float]:
    """Signal and noise from a batch of `rows` in two or more shards, even or not.

    `weighted_squares` is the sum, over the shards that have rows, of rows times the squared length
    of the shard's mean gradient; `whole_squared` is the squared length of the batch's.
    """
    return signal_and_noise(weighted_squares / rows, rows / shards, whole_squared, rows)


def signal_and_noise(
    small_squared: float, small_rows: float, large_squared: float, large_rows: float
) -> tuple[float, float]:
    """Unbiased estimates of the true gradient's squared length, and of one row's variance.

    Either may come out negative: a single measurement is rough.
    """
    noise = (small_squared - large_squared) / (1.0 / small_rows - 1.0 / large_rows)
    signal = (large_rows * large_squared - small_rows * small_squared) / (large_rows - small_rows)
    return signal, noise


@dataclass(frozen=True, slots=True)
class NoiseEstimate:
    """What the measurements so far say."""

    noise_scale: float
    """In rows, or in whatever the losses were weighted by; infinite if noise drowns the signal."""
    batch: float
    """The global batch that was measured with, in the same unit."""
    measurements: int

    @property
    def fewer_steps(self) -> float:
        """The share of the steps that a batch twice as large would save, from 0 to a half."""
        if math.isinf(self.noise_scale):
            return 0.5
        ratio = self.noise_scale / self.batch
        return 0.5 * ratio / (1.0 + ratio)

    @property
    def advice(self) -> str:
        """Would more workers still help? In one sentence or two."""
        batch = f"{self.batch:,.0f}"
        scale = "above anything measurable" if math.isinf(self.noise_scale) else ""
        scale = scale or f"about {round_to(self.noise_scale, 2):,.0f}"
        saved = f"{self.fewer_steps:.0%} of the steps"
        start = f"The gradient noise scale is {scale}, the global batch {batch}."
        if self.fewer_steps >= _HELPS_MUCH:
            return f"{start} More workers still help: twice the batch would save about {saved}."
        if self.fewer_steps >= _HELPS_LITTLE:
            return f"{start} More workers help a little: twice the batch would save about {saved}."
        return (
            f"{start} More workers hardly help: twice the batch would save only {saved}. "
            "Keep the global batch, or make it smaller."
        )


class NoiseScale:
    """Averages measurements over time: signal and noise apart, and only then their ratio.

    The mean of the ratios would be wrong, and often infinite.
    """

    def __init__(self, horizon: float = HORIZON) -> None:
        self.horizon = horizon
        self.measurements = 0
        self._signal = self._noise = self._batch = 0.0

    def add(self, signal: float, noise: float, batch: float) -> None:
        """One measurement. Something that is no number, as after an overflow, does not count."""
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return
        keep = 1.0 - 1.0 / min(self.measurements + 1.0, self.horizon)
        self._signal = keep * self._signal + (1.0 - keep) * signal
        self._noise = keep * self._noise + (1.0 - keep) * noise
        self._batch = keep * self._batch + (1.0 - keep) * batch
        self.measurements += 1

    def estimate(self) -> NoiseEstimate | None:
        """None while there are too few measurements to say anything."""
        if self.measurements < _FEWEST:
            return None
        noise = max(self._noise, 0.0)
        scale = noise / self._signal if self._signal > 0.0 else math.inf
        return NoiseEstimate(scale, self._batch, self.measurements)

    def state_dict(self) -> dict[str, float]:
        return {
            "measurements": self.measurements,
            "signal": self._signal,
            "noise": self._noise,
            "batch": self._batch,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.measurements = int(state["measurements"])
        self._signal, self._noise = state["signal"], state["noise"]
        self._batch = state["batch"]


def round_to(value: float, digits: int) -> float:
    """Round to so many significant digits: an estimate should not look like a measurement."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


# Note [Two batch sizes]
#
# Let g be the mean gradient of B independent rows, G the true gradient and S the sum over all
# parameters of the variance of one row's gradient. Then E|g|^2 = |G|^2 + S/B. Two batch sizes give
# two equations, and so unbiased estimates of |G|^2 and S; their ratio S/|G|^2 is the "simple" noise
# scale of McCandlish, Kaplan, Amodei and the OpenAI Dota team, "An Empirical Model of Large-Batch
# Training" (2018), appendix A.1.
#
# The large batch is the whole one, of N rows. The small ones are its k shards, with n_1 ... n_k
# rows. Weighting their squared lengths by rows,
#
#     E sum_i (n_i/N) |g_i|^2 = |G|^2 + sum_i (n_i/N) S/n_i = |G|^2 + S k/N,
#
# so together they stand for one small batch of N/k rows, however uneven they are. The estimate of
# S is then (sum_i n_i |g_i - g|^2) / (k - 1), the textbook variance between groups, which cannot
# be negative.
#
# The model of the same paper says how many steps a training needs: in proportion to
# 1 + (noise scale)/B. `fewer_steps` is what that gives for 2B instead of B.
