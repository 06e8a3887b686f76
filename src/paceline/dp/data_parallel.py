"""DataParallel: one process, one model, a replica on each device.

A forward pass is scatter, replicate, parallel apply, gather, in the files of these names; this one
puts them in order. `backward()` computes the loss on the replicas too, so that only numbers
come together on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.comm import tree
from paceline.ddp.wrapper import Wrapper
from paceline.dp.devices import Device, find_place, find_places, move
from paceline.dp.engine import Engine
from paceline.dp.gather import gather
from paceline.dp.loss import Count, Reduction, plan_factors, total_loss
from paceline.dp.options import DEFAULT_OPTIONS, DPOptions, check_split
from paceline.dp.scatter import scatter
from paceline.errors import UsageError


class DataParallel(Wrapper):
    """Runs a module on several devices at once, each on a part of the batch.

    Takes torch's arguments and gives torch's outputs and gradients. Devices may also be parts of
    the CPU, `["cpu:0", "cpu:1"]`, each a thread. `split` shares the rows out by weight, for devices
    of unequal speed; `options` holds what else torch's class has no argument for.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        split: Sequence[float] | None = None,
        options: DPOptions = DEFAULT_OPTIONS,
    ) -> None:
        _check_arguments(module, dim)
        places = find_places(device_ids)
        check_split(split, len(places))
        nn.Module.__init__(self)
        # Set before `module`: from then on, names that the module has are set on the module.
        self.dim = dim
        self.device_ids = [place.torch_id for place in places]
        self.split = None if split is None else list(split)
        self._places = places
        self._dp_options = options
        first = places[0] if output_device is None else find_place(output_device, "output_device")
        self._output_place = first
        self.output_device = first.torch_id
        self.src_device_obj = places[0].device
        self._engine: Engine | None = None
        if len(places) == 1:
            module = module.to(places[0].device)
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the replicas' parts of the inputs, and join their outputs."""
        if len(self._places) == 1:
            return self._run_alone(inputs, kwargs)
        chunks = scatter(inputs, kwargs, self._places, self.dim, self.split)
        outputs = self._ready_engine().forward(chunks)
        places = [self._places[chunk.replica] for chunk in chunks]
        return gather(outputs, places, self._output_place.device, self.dim)

    # A graph captured by torch.compile cannot contain threads.
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]

    def backward(
        self,
        loss_fn: Callable[..., Tensor],
        inputs: Any,
        targets: Any = None,
        kwargs: dict[str, Any] | None = None,
        *,
        reduction: Reduction = "mean",
        count: Count | None = None,
    ) -> Tensor:
        """Forward, loss and backward on the replicas; returns the loss of the whole batch.

            loss = model.backward(F.cross_entropy, images, labels)

        Each replica computes `loss_fn(module(*inputs, **kwargs), targets)` for its chunk, without
        `targets` if there are none, and its gradients. A tuple of `inputs` is several arguments.
        With reduction "mean" the chunks' losses are weighed by their rows, or by `count(targets)`,
        such as the number of tokens that are not padding. With "sum" they are added up, and
        divided by the sum of `count(targets)` if that is given.
        Gradients are added to the parameters' own when all replicas have succeeded.
        """
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        chunks = scatter(args, kwargs or {}, self._places, self.dim, self.split, targets)
        factors = plan_factors(chunks, reduction, count, self._places)
        losses = self._ready_engine().backward(chunks, loss_fn, factors)
        return total_loss(losses, factors, self._output_place.device)

    def _run_alone(self, inputs: Any, kwargs: Any) -> Any:
        device = self._places[0].device
        inputs, kwargs = tree.map_tensors(lambda tensor: move(tensor, device), (inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        target = self._output_place.device
        return output if target == device else tree.map_tensors(lambda t: t.to(target), output)

    def _ready_engine(self) -> Engine:
        engine = self._engine
        if engine is None or not engine.is_usable(self.module):
            engine = Engine(self.module, self._places, self._dp_options)
            self.__dict__["_engine"] = engine
        return engine

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state = {key: copy.deepcopy(value, memo) for key, value in self.__getstate__().items()}
        clone.__dict__ |= state
        return clone


def _check_arguments(module: Any, dim: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{module!r} is no module.", advice="Pass a torch.nn.Module: it is what is copied."
        )
    if not isinstance(dim, int):
        raise UsageError(
            f"dim is {dim!r}, which is no whole number.",
            advice="Pass the number of the dimension that holds the batch, mostly 0.",
        )
