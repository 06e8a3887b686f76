"""Whether islands would pay, given the measured step and a network's bandwidth.

Every worker counts as an island. With predicted sizes the forecast is for the largest on each
network, otherwise for the measured size on this machine's transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.islands import Forecast, forecast_islands
from paceline.show.scaling.prediction import Job, Network, SizePrediction, exposed_s, find_turn
from paceline.telemetry import Phase, bytes_text

_LEAST, _MOST = 1e3, 1e13
"""The range of bandwidths, in bytes per second, in which `find_limit` searches."""


def forecast_by_network(
    job: Job, predicted: Sequence[tuple[SizePrediction, Network]]
) -> list[dict[str, Any]]:
    """The forecast for each network, as JSON, with the network's name."""
    largest = {network: size for size, network in predicted}  # sizes come in order
    cases = [
        (size.workers, network, size.step_s, size.exposed_s)
        for network, size in largest.items()
        if size.workers > 1 and not size.without_rows
    ]
    if not predicted:
        measured = job.several
        cases = [(measured.workers, job.local, measured.step_s, measured.seconds[Phase.TRANSFER])]
    weighed = []
    for workers, network, step_s, exchange_s in cases:
        if found := _forecast(job, workers, network, step_s - exchange_s, exchange_s):
            text = f"{network.name}: {found.sentence}" if predicted else _below(job, found)
            weighed.append({**found.as_json(), "network": network.name, "text": text})
    return weighed


def _below(job: Job, found: Forecast) -> str:
    """The forecast's sentence; if islands do not pay here, the bandwidth below which they would."""
    if found.pays:
        return found.sentence
    limit = find_limit(job, found.islands, found.apart_s)
    known = f", {bytes_text(found.bytes_per_s)}/s," if found.bytes_per_s < _MOST else ""
    return (
        f"Islands do not pay on this machine's own transport{known} and would below about "
        f"{bytes_text(limit)}/s between workers: {found.settings} would send "
        f"{bytes_text(found.round_bytes)} in {found.options.every} steps instead of "
        f"{bytes_text(found.step_bytes)} in each. They change the training: see docs/islands.md."
    )


def _forecast(
    job: Job, workers: int, network: Network, alone_s: float, exchange_s: float
) -> Forecast | None:
    parameters = sum(bucket.nbytes for bucket in job.several.buckets) / 4
    if not parameters or alone_s <= 0:
        return None
    return forecast_islands(
        step_s=alone_s,
        parameters=parameters,
        bytes_per_s=network.bytes_per_s,
        latency_s=network.latency_s,
        islands=workers,
        exchange_s=exchange_s,
    )


def find_limit(job: Job, workers: int, alone_s: float) -> float:
    """The bandwidth below which islands pay, in bytes per second."""
    buckets, backward_s = job.several.buckets, job.several.seconds[Phase.BACKWARD]

    def pays(bytes_per_s: float) -> bool:
        network = Network("", 0.0, bytes_per_s)
        exchange_s = exposed_s(buckets, backward_s, workers, network)
        found = _forecast(job, workers, network, alone_s, exchange_s)
        return found is not None and found.pays

    return find_turn(_LEAST, _MOST, pays)
