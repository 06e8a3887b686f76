"""What a start says that continues a run: where its script is not the one that began it.

A checkpoint decides about the weights and the optimizer's settings, whatever the script says; of
the data it has only some samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch import nn

from paceline.ddp import checksum
from paceline.errors import DesyncError
from paceline.run.config import RunConfig
from paceline.run.loader import refuse_other_samples

_OF_SCHEDULERS = frozenset({"lr", "momentum", "betas", "max_lr", "min_lr", "max_momentum"})
"""Settings that a scheduler changes."""


class Resume:
    """What the script has made, compared with what is loaded into it."""

    def __init__(self, config: RunConfig) -> None:
        models, self._scheduled = config.models, config.schedulers.keys()
        self._optimizers = models.optimizers.parts if models else {"": config.optimizer}
        self._given = {
            name: [dict(group) for group in optimizer.param_groups]
            for name, optimizer in self._optimizers.items()
        }
        self._loaded: list[tuple[nn.Parameter, int, list[int]]] = []

    def note_loaded(self, module: nn.Module) -> Self:
        """The checkpoint is loaded."""
        params = list(module.parameters())
        self._loaded = [(p, p._version, checksum(p).tolist()) for p in params]
        return self

    def lines(self, samples: Any, saved_samples: Any) -> Iterator[str]:
        """What to say when the loop begins; samples as `sum_up_samples` gives them, or None."""
        if changes := "; ".join(self._changes()):
            yield f"The optimizer continues as in the checkpoint: {changes}."
        if isinstance(samples, Mapping) and isinstance(saved_samples, Mapping):
            try:
                refuse_other_samples(
                    dict(samples), dict(saved_samples), "here", "in the checkpoint"
                )
            except (DesyncError, TypeError, ValueError) as error:
                yield (
                    "The dataset is not the one that this run was trained on so far. "
                    f"{getattr(error, 'where', error)}"
                )

    def _changes(self) -> Iterator[str]:
        for model, optimizer in self._optimizers.items():
            whose = f" of {model}" if model else ""
            left_out = {"params", *(_OF_SCHEDULERS if model in self._scheduled else ())}
            for given, group in zip(self._given[model], optimizer.param_groups, strict=False):
                for name in sorted(given.keys() & group.keys() - left_out):
                    here, there = repr(given[name]), repr(group[name])
                    if here != there:
                        yield f"{name}{whose} is {there:.40}, and not {here:.40} as in the script"

    def find_overwritten(self) -> list[str]:
        """What to say if the script has given the model other weights since."""
        loaded, self._loaded = self._loaded, []
        if all(p._version == version or checksum(p).tolist() == s for p, version, s in loaded):
            return []
        return [
            "The script has given the model other weights after Run() had loaded those of the "
            "checkpoint, and the run continues with them. Load weights before Run(): a checkpoint "
            "replaces them."
        ]
