"""Parameters that live in one flat buffer, so that a slice of the buffer is a slice of all of them.

Every parameter keeps a storage of its own, which is a stretch of the buffer: it is saved, copied
and shared as any other. A parameter may be given other memory (`p.data = ...`, `model.to(...)`):
its values are then copied in before each update and out after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.ddp import Slot, geometry
from paceline.errors import DeviceError
from paceline.transport import dense_layout


class FlatParams:
    """Some parameters of one dtype and device, and the buffer that they live in."""

    def __init__(
        self, memory: Tensor, slots: Sequence[Slot], named: Sequence[tuple[str, Parameter]]
    ) -> None:
        """`named` are the parameters of the slots."""
        self.memory, self.slots = memory, slots
        self.params = [param for _, param in named]
        self._names = [name for name, _ in named]
        self.layouts = [dense_layout(param) for param in self.params]
        self._views = [
            stretch(memory, slot).as_strided(*layout).data
            for slot, layout in zip(slots, self.layouts, strict=True)
        ]
        self._geometry = geometry(self._views)
        self._guests: list[tuple[Parameter, Tensor]] = []
        """Parameters that live elsewhere, and their places here."""
        with torch.no_grad():
            for param, view in zip(self.params, self._views, strict=True):
                view.copy_(param)
                param.data = view.data  # a tensor of its own: ours stays what it is

    @torch.no_grad()
    def copy_in(self) -> None:
        """Bring the parameters that live elsewhere up to date here."""
        self._guests = []
        if geometry(self.params) == self._geometry:
            return
        for name, param, view in zip(self._names, self.params, self._views, strict=True):
            if geometry([param]) == geometry([view]):
                continue
            if (param.dtype, param.device) != (view.dtype, view.device):
                raise DeviceError(
                    f"Parameter {name!r} is {param.dtype} on {param.device}, but was {view.dtype} "
                    f"on {view.device} when its update was shared out.",
                    advice="Move or convert the model first, then wrap it and share the update.",
                )
            view.copy_(param)
            self._guests.append((param, view))

    @torch.no_grad()
    def copy_out(self) -> None:
        """Give their new values to the parameters that live elsewhere."""
        for param, view in self._guests:
            param.data.copy_(view)
        self._guests = []


def stretch(memory: Tensor, slot: Slot) -> Tensor:
    """The elements of a slot, as a flat tensor with a storage of its own over the same memory."""
    width = memory.element_size()
    first = memory.storage_offset() * width
    storage = memory.untyped_storage()[first + slot.start * width : first + slot.stop * width]
    return memory.new_empty(0).set_(storage, 0, (slot.stop - slot.start,), (1,))
