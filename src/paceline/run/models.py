"""Several models in one run, each with an optimizer of its own, that take turns in a step.

    Run({"generator": (g, g_optimizer), "critic": (d, d_optimizer)}, dataset, ...)

Each has an engine and an update of its own, with which a turn is computed, summed and committed as
the step of a run with one model is. Between turns `TurnEngine` and `TurnUpdate` stand for all of
them, and all models together are one module: buffers, checkpoints and healing know no turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import Parameter

from paceline.ddp import DistributedDataParallel, Engine, Wrapper
from paceline.errors import UsageError, check_number, did_you_mean, shown
from paceline.update import WeightAverage, WholeUpdate, load_state

if TYPE_CHECKING:
    from paceline.group import Membership
    from paceline.run.config import RunConfig

_ADVICE = (
    'Pass {"generator": (g, g_optimizer), "critic": (d, d_optimizer)}; a model that is not trained '
    'alone, or paceline.EMA("student") for an average of another one.'
)


DECAY_ADVICE = "Pass how much of the average a step keeps, between 0 and 1, such as 0.999."


@dataclass(frozen=True)
class EMA:
    """In the models of a `Run`: the average of the weights of the one called `of`.

    It begins as a copy and moves in every commit of that model, by torch's arithmetic; it warms up
    as `RunOptions(ema=)` does.
    """

    of: str
    decay: float = 0.999

    def __post_init__(self) -> None:
        check_number("decay", self.decay, 0, 1, DECAY_ADVICE)


class ByName:
    """The parts of several models that have a state, as one that has."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if odd := sorted(state.keys() ^ self.parts.keys()):
            raise UsageError(f"{odd[0]!r} is on one side only.")
        for name, part in self.parts.items():
            load_state(part, state[name])


class Optimizers(ByName):
    """Those of all models, to read what they are set to."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.parts.values() for group in each.param_groups]

    def step(self) -> None:
        raise UsageError("The optimizers of a run are stepped by its turns.", advice=_ADVICE)

    zero_grad = step


def take_models(config: RunConfig) -> None:
    """Several models were passed: the argument after them is the dataset, and each has its own
    optimizer."""
    options: Any = config.options
    if config.dataset is None:
        config.dataset, config.optimizer = config.optimizer, None  # type: ignore[assignment]
    refused = {
        "optimizer": config.optimizer is not None,
        "update": options.update != "whole",
        "ema": options.ema is not None,
        "noise_every": bool(options.noise_every),
        "audit": bool(options.audit),
    }
    for name in (name for name, is_given in refused.items() if is_given):
        raise UsageError(f"{name} was passed, and the run has several models.", advice=_ADVICE)
    config.models = models = Models(config)
    config.model, config.optimizer = models.modules, models.optimizers  # type: ignore[assignment]
    config.scheduler = config.scaler = None


class Models:
    """What was passed as the models of a run, checked: modules, optimizers and averages by name."""

    def __init__(self, config: RunConfig) -> None:
        given: Mapping[str, Any] = config.model  # type: ignore[assignment]
        self.modules = nn.ModuleDict()
        self.averages: dict[str, EMA] = {}
        optimizers: dict[str, Any] = {}
        for name, value in given.items():
            module, optimizer = (
                value if isinstance(value, tuple) and len(value) == 2 else (value, None)
            )
            if isinstance(module, EMA):
                self.averages[name] = module
                continue
            if not isinstance(module, nn.Module) or isinstance(module, Wrapper):
                raise UsageError(
                    f"The model {name!r} is {shown(module)}.", advice=f"{_ADVICE} A run wraps them."
                )
            if optimizer is not None:
                optimizers[name] = optimizer
            else:
                module.requires_grad_(False)
            self.modules[name] = module
        for name, average in self.averages.items():
            if average.of not in optimizers:
                meant = did_you_mean(average.of, optimizers)
                raise UsageError(
                    f"The model {name!r} is an average of {average.of!r}, which is not trained."
                    f"{meant}",
                    advice=_ADVICE,
                )
            self.modules[name] = deepcopy(self.modules[average.of]).requires_grad_(False)
        if not optimizers:
            raise UsageError("None of the models has an optimizer.", advice=_ADVICE)
        self.optimizers = Optimizers(optimizers)
        self.schedulers = self._read(config.scheduler, "scheduler")
        self.scalers = self._read(config.scaler, "scaler")
        clip = config.options.clip_norm
        self.clip_norms = (
            self._read(clip, "clip_norm")
            if isinstance(clip, Mapping)
            else dict.fromkeys(optimizers, clip)
        )
        self._refuse_shared()

    def _read(self, value: Any, what: str) -> dict[str, Any]:
        """An argument by the names of the models that are trained."""
        trained = self.optimizers.parts
        if value is not None and not isinstance(value, Mapping):
            name = next(iter(trained))
            raise UsageError(
                f"{what} is {shown(value, 60)}, and the run has several models.",
                advice=f"Pass them by name: {what}={{{name!r}: ...}}.",
            )
        given = value or {}
        for name in given:
            if name not in trained:
                meant = did_you_mean(name, trained)
                raise UsageError(
                    f"{what} has {name!r}, which is not trained.{meant}", advice=_ADVICE
                )
        return {name: given[name] for name in trained if name in given}

    def _refuse_shared(self) -> None:
        owner: dict[int, str] = {}
        for name in self.optimizers.parts:
            for param in self.modules[name].parameters():
                if (other := owner.setdefault(id(param), name)) != name:
                    raise UsageError(
                        f"The models {other!r} and {name!r} share a parameter of shape "
                        f"{tuple(param.shape)}, and each would step it.",
                        advice="Put what they share into one model with one optimizer.",
                    )

    def averages_of(self, name: str) -> list[WeightAverage]:
        return [
            WeightAverage(self.modules[name], each.decay, into=self.modules[teacher])
            for teacher, each in self.averages.items()
            if each.of == name
        ]

    def untrained(self) -> list[Tensor]:
        """Parameters and buffers that no engine keeps equal."""
        names = self.modules.keys() - self.optimizers.parts.keys()
        found: list[Tensor] = []
        for name in sorted(names):
            found += [*self.modules[name].parameters(), *self.modules[name].buffers()]
        return found


class TurnEngine:
    """The engines of all models, and whose turn it is, if one is open."""

    def __init__(self, models: Models, engines: dict[str, Engine], members: Membership) -> None:
        self.module: nn.Module = models.modules
        self.models, self.membership, self.engines = models.modules, members, engines
        self.name = ""
        """Whose turn it is."""
        self.identity = self.identity  # one after the other, as a newcomer is told
        self._frozen: list[Parameter] = []

    def open(self, name: str) -> None:
        """It is the turn of this model."""
        self.name = name
        self.freeze()

    def close(self) -> None:
        """The turn is over."""
        self.name = ""
        self.thaw()

    def freeze(self) -> None:
        """Have the other models let gradients through and get none."""
        for other, module in self.models.items():
            if other != self.name:
                self._frozen += [param for param in module.parameters() if param.requires_grad]
        for param in self._frozen:
            param.requires_grad_(False)

    def thaw(self) -> None:
        """Have all models trained, as engines must see them where a generation begins."""
        for param in self._frozen:
            param.requires_grad_(True)
        self._frozen = []

    def __call__(self, *_: Any, **__: Any) -> Any:
        names = ", ".join(self.models)
        raise UsageError(
            "This run has several models.", advice=f"Call run.models[name], one of {names}."
        )

    @property
    def identity(self) -> int:
        return next(iter(self.engines.values())).identity

    @identity.setter
    def identity(self, number: int) -> None:
        for place, engine in enumerate(self.engines.values()):
            engine.identity = number + place


class ModelInTurn:
    """One of several models, to be called in the loop: in its turn by its engine."""

    def __init__(self, engine: TurnEngine, name: str) -> None:
        self._name, self._engine = name, engine
        self.module = engine.models[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine
        model: Any = engine.engines[self._name] if engine.name == self._name else self.module
        return model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def models_to_call(engine: Any) -> dict[str, ModelInTurn]:
    """Those of a run by name; none where there is one model."""
    names = engine.models if isinstance(engine, TurnEngine) else ()
    return {name: ModelInTurn(engine, name) for name in names}


class TurnUpdate:
    """The updates of all models, and what averages each of them."""

    def __init__(self, models: Models, updates: dict[str, WholeUpdate]) -> None:
        self.updates = updates
        self.averages = {name: models.averages_of(name) for name in updates}
        self.parts: dict[str, Any] = {"optimizer": models.optimizers}
        for kind in ("scheduler", "scaler"):
            found = {n: each.parts[kind] for n, each in updates.items() if kind in each.parts}
            if found:
                self.parts[kind] = ByName(found)

    def rate(self, metric: float) -> None:
        for update in self.updates.values():
            update.rate(metric)

    def abandon(self) -> None:
        for update in self.updates.values():
            update.abandon()

    def finish(self) -> None:
        for update in self.updates.values():
            update.finish()

    def refuse_others(self, known: Sequence[Any]) -> Callable[[], None]:
        """Refuse steps of optimizers that the run knows nothing of; what is returned ends that."""
        known = [*known, *self.parts["optimizer"].parts.values()]
        refusals = ExitStack()
        for update in self.updates.values():
            refusals.callback(update.refuse_others(known))
        return refusals.close


def adopted_by(engine: Any) -> list[list[str]]:
    """By model, the parameters that its engine follows since they were unfrozen, in that order.

    Other engines than DDP look in every step which those are.
    """
    return [
        list(each.reducer.adopted) if isinstance(each, DistributedDataParallel) else []
        for each in _engines_of(engine)
    ]


def adopt(engine: Any, names: Sequence[Sequence[str]]) -> None:
    """Have the engines follow what those of other workers do, in a new generation."""
    for each, known in zip(_engines_of(engine), names, strict=True):
        if known:
            each.reducer.adopt(known)


def _engines_of(engine: Any) -> list[Any]:
    return list(engine.engines.values()) if isinstance(engine, TurnEngine) else [engine]
