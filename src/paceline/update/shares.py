"""A rank's share of the parameters: the tensors that it steps, and what they are cut from.

Two ways, by what the optimizer's step depends on. `ElementShares`: the parameters live in buffers
laid out as the buckets of their gradients, and a rank steps its slice of each, in pieces.
`TensorShares`: every parameter is stepped, whole, by one rank. Either way the slices of a buffer
are the transport's, so that one call gathers it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.ddp import Bucket, Slot, SummedGradients, broadcast_tensors, geometry
from paceline.errors import DeviceError
from paceline.files import dtype_name
from paceline.group import exchange, waiting, word_device
from paceline.transport import Flat, dense_layout, place, slices
from paceline.update.cut import (
    PIECE_NUMEL,
    ParamSlice,
    Piece,
    State,
    cut_pieces,
    cut_state,
    deal_tensors,
    describe,
    in_memory_order,
    likeness,
    split_piece,
    split_state,
    value_of,
)
from paceline.update.exchange import Shares, States
from paceline.update.kind import merges


class FlatParams:
    """Some parameters of one dtype and device, and the buffer that they live in.

    Every parameter keeps a storage of its own, which is a stretch of the buffer: it is saved,
    copied and shared as any other. One may be given other memory (`p.data = ...`): its values are
    then copied in before each update and out after it.
    """

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


Named = tuple[str, Parameter]


@dataclass(slots=True, eq=False)
class Own:
    """Something that this rank steps, and the group of the optimizer that it is in."""

    group: int
    tensor: Parameter
    piece: Piece


class FlatShares(Shares):
    """The parameters of a model in flat buffers, and this rank's share of them.

    Made by all ranks at one point. What no bucket averages (sparse gradients, frozen and empty
    parameters) is not in it: every rank steps that as it is.
    """

    def __init__(self, reducer: SummedGradients, optimizer: Optimizer, states: States) -> None:
        """`states` are those of whole parameters; they are cut here, and kept by the optimizer."""
        self.reducer = reducer
        self.rank, self.size = reducer.membership.rank, reducer.size
        self._group_of = {
            id(param): number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self.named: list[Named] = []
        """The parameters in the buffers; the others belong to them by their number here."""
        plan = self._plan()
        self._shared = {id(param) for _, param in self.named}
        what = f"Step {reducer.steps - 1}: finding memory for the parameters"
        self._places = place(reducer.transport, [flat for flat, _ in plan], what)
        self.flats = []
        for (flat, slots), home in zip(plan, self._places.homes, strict=True):
            if home is None:
                home = torch.zeros(flat.numel, dtype=flat.dtype, device=flat.device)
            self.flats.append(FlatParams(home, slots, [self.named[slot.param] for slot in slots]))
        self._layouts = {
            slot.param: layout
            for flat in self.flats
            for slot, layout in zip(flat.slots, flat.layouts, strict=True)
        }
        """How each parameter lies in memory."""
        self._is_described = False
        self.own: list[Own] = []
        self.states = {}
        self.adopt(states)

    def adopt(self, states: States) -> None:
        self.own, mine = self._cut(states)
        shared = self._shared & self._group_of.keys()
        rest = {key: state for key, state in states.items() if id(key) not in shared}
        self.states = defaultdict(dict, {**mine, **rest})

    @abstractmethod
    def _plan(self) -> list[tuple[Flat, list[Slot]]]:
        """Name the parameters, and lay them out in buffers."""

    @abstractmethod
    def _cut(self, states: States) -> tuple[list[Own], States]:
        """What this rank steps, and its part of the state of whole parameters."""

    def begin(self) -> None:
        for flat in self.flats:
            flat.copy_in()

    def tensors(self, group: int, params: list[Parameter]) -> list[Parameter]:
        mine = [own.tensor for own in self.own if own.group == group]
        return [*mine, *(param for param in params if id(param) not in self._shared)]

    def gather(self) -> None:
        if not self._is_described:  # a state that could not be collected is refused at once
            self.describe()
            self._is_described = True
        what = f"Step {self.reducer.steps - 1}: gathering the new parameters"
        under_way = [
            self._places.gather(number, flat.memory, what) for number, flat in enumerate(self.flats)
        ]
        with waiting(self.reducer.membership.group):
            for gathering in under_way:
                gathering.wait()
        for flat in self.flats:
            flat.copy_out()
            increment_version(flat.params)  # autograd is to notice, as after any update in place

    def describe(self) -> dict[str, Any]:
        """This rank's part of the state in words, by parameter."""
        found: dict[str, Any] = {}
        for own in self.own:
            if state := self.states.get(own.tensor):
                words = describe(state, own.tensor.shape)
                found.update({str(part.param): words for part in own.piece.parts})
        return found

    def _slice(self, number: int) -> tuple[int, int]:
        """This rank's slice of a buffer."""
        return slices(self.flats[number].memory.numel(), self.size)[self.rank]

    def _exchange(self) -> list[dict[str, Any]]:
        group, device = self.reducer.membership.group, self.reducer.buckets[-1].plan.device
        what = "optimizer.state_dict() of an update that is shared out"
        self.reducer.meet(what)
        return exchange(group, self.describe(), word_device(group, device), what)

    def _others(self) -> States:
        """What does not belong to parameters in the buffers."""
        mine = {id(own.tensor) for own in self.own}
        return {key: state for key, state in self.states.items() if id(key) not in mine}


class ElementShares(FlatShares):
    """Every rank steps its slice of each buffer, in pieces."""

    most_numel = PIECE_NUMEL
    """Of a piece."""

    def __init__(self, reducer: SummedGradients, optimizer: Optimizer, states: States) -> None:
        self._is_fused = any(group.get("fused") for group in optimizer.param_groups)
        self._buckets: list[Bucket] = []
        super().__init__(reducer, optimizer, states)

    def _plan(self) -> list[tuple[Flat, list[Slot]]]:
        found = []
        for bucket in self.reducer.buckets:
            plan, slots = bucket.plan, []
            for slot, name, param in zip(plan.slots, bucket.names, bucket.params, strict=True):
                if param is not None and param.numel():
                    slots.append(Slot(len(self.named), slot.start, slot.stop))
                    self.named.append((name, param))
            if slots:
                found.append((Flat(plan.numel, plan.dtype, plan.device), slots))
                self._buckets.append(bucket)
        return found

    def _cut(self, states: States) -> tuple[list[Own], States]:
        kinds: list[Hashable] = []
        for _, param in self.named:
            group = self._group_of.get(id(param))
            like = likeness(states.get(param, {}), param.shape)
            kinds.append(None if group is None else (group, like))
        mine: list[Own] = []
        cut: States = {}
        for number, flat in enumerate(self.flats):
            can_merge = merges(flat.memory.dtype, is_fused=self._is_fused)
            own_slice = self._slice(number)
            most = self.most_numel
            pieces = cut_pieces(number, flat.slots, own_slice, kinds, merges=can_merge, most=most)
            for piece in pieces:
                own = self._take(piece)
                mine.append(own)
                params = [self.named[part.param][1] for part in piece.parts]
                # Only parameters whose states are alike share a piece: all have one, or none has.
                if states.get(params[0]):
                    layouts = [self._layouts[part.param] for part in piece.parts]
                    cut[own.tensor] = cut_state(piece, [states[p] for p in params], layouts)
        return mine, cut

    def _take(self, piece: Piece, values: Tensor | None = None) -> Own:
        if values is None:
            values = self.flats[piece.flat].memory[piece.start : piece.stop]
        group = self._group_of[id(self.named[piece.parts[0].param][1])]
        return Own(group, Parameter(values), piece)

    def begin(self) -> None:
        """Gradients are views of the buckets, where those hold what the parameters have."""
        super().begin()
        moved = {n for n, bucket in enumerate(self._buckets) if not bucket.is_handed_out()}
        if moved:
            self._split_mixed(moved)
        for own in self.own:
            piece = own.piece
            if piece.flat not in moved:
                own.tensor.grad = self._buckets[piece.flat].flat[piece.start : piece.stop]
            elif self._has_grad(piece.parts[0]):
                own.tensor.grad = self._join_grads(piece)

    def hold(self) -> None:
        """This rank steps other pieces now."""

    def _has_grad(self, part: ParamSlice) -> bool:
        return self.named[part.param][1].grad is not None

    def _join_grads(self, piece: Piece) -> Tensor:
        """The gradients of a piece as one tensor: where they lie, if they do so side by side."""
        grads = [self._grad(part) for part in piece.parts]
        first, width = grads[0], grads[0].element_size()
        memory = first.untyped_storage()
        begin = first.data_ptr() - (piece.parts[0].at - piece.start) * width
        are_together = all(
            grad.data_ptr() == begin + (part.at - piece.start) * width
            and grad.untyped_storage().data_ptr() == memory.data_ptr()
            for grad, part in zip(grads, piece.parts, strict=True)
        )
        if are_together:
            length, offset = piece.stop - piece.start, begin - memory.data_ptr()
            return first.as_strided((length,), (1,), offset // width)
        joined = first.new_zeros(piece.stop - piece.start)
        for grad, part in zip(grads, piece.parts, strict=True):
            joined[part.at - piece.start :][: grad.numel()] = grad
        return joined

    def _grad(self, part: ParamSlice) -> Tensor:
        grad = self.named[part.param][1].grad
        assert grad is not None  # a piece has a gradient in all of its parts, or in none
        dense = grad.to_dense() if grad.layout is not torch.strided else grad
        return in_memory_order(dense, self._layouts[part.param])[part.start : part.stop]

    def _split_mixed(self, moved: Iterable[int]) -> None:
        """An optimizer leaves a parameter alone that has no gradient: it can be in no piece with
        one that has."""
        own: list[Own] = []
        for each in self.own:
            piece = each.piece
            has = [self._has_grad(part) for part in piece.parts]
            if piece.flat not in moved or len(set(has)) == 1:
                own.append(each)
                continue
            state = self.states.pop(each.tensor, None)
            for smaller in split_piece(piece, has):
                own.append(self._take(smaller))
                if state:
                    self.states[own[-1].tensor] = split_state(state, piece, smaller)
        if len(own) > len(self.own):
            self.own = own
            self.hold()

    def drop_grads(self) -> None:
        for own in self.own:
            own.tensor.grad = None

    def collect(self, *, keeps: bool = True) -> States:
        words_by_param: dict[int, dict[str, Any]] = {}
        for theirs in self._exchange():
            words_by_param |= {int(number): words for number, words in theirs.items()}
        whole: States = self._others()
        for number, (_, param) in enumerate(self.named):
            if words := words_by_param.get(number):
                whole[param] = {
                    key: value_of(each, param) for key, each in words.items() if each[0] != "cut"
                }
        for number, flat in enumerate(self.flats):
            found = {
                (key, each[1])
                for slot in flat.slots
                for key, each in words_by_param.get(slot.param, {}).items()
                if each[0] == "cut"
            }
            # Sorted, because all ranks gather in one order, and a set has none.
            for key, dtype in sorted(found):
                buffer = self._gather_state(number, key, getattr(torch, dtype))
                for slot, layout in zip(flat.slots, flat.layouts, strict=True):
                    words = words_by_param.get(slot.param, {})
                    if keeps and words.get(key) == ["cut", dtype]:
                        # Cloned: a view would keep all of the buffer, and be saved with it.
                        part = buffer[slot.start : slot.stop].as_strided(*layout)
                        whole[self.named[slot.param][1]][key] = part.clone()
        return whole if keeps else {}

    def _gather_state(self, number: int, key: str, dtype: torch.dtype) -> Tensor:
        """One kind of tensor of the state, for a whole buffer."""
        memory = self.flats[number].memory
        buffer = torch.zeros(memory.numel(), dtype=dtype, device=memory.device)
        for own in self.own:
            value = self.states.get(own.tensor, {}).get(key)
            if own.piece.flat == number and isinstance(value, Tensor) and value.dtype == dtype:
                buffer[own.piece.start : own.piece.stop] = value
        what = f"Gathering {key!r} of the optimizer's state"
        self.reducer.transport.gather(buffer, what).wait()
        return buffer


class TensorShares(FlatShares):
    """Every parameter is stepped, whole, by the rank in whose slice it lies."""

    def _plan(self) -> list[tuple[Flat, list[Slot]]]:
        by_kind: dict[Any, list[Named]] = defaultdict(list)
        for bucket in self.reducer.buckets:
            for name, param in zip(bucket.names, bucket.params, strict=True):
                if param is not None and param.numel():
                    by_kind[param.dtype, param.device].append((name, param))
        found = []
        for (dtype, device), named in by_kind.items():
            length, slots = deal_tensors([param.numel() for _, param in named], self.size)
            first = len(self.named)
            self.named += named
            moved = [Slot(first + slot.param, slot.start, slot.stop) for slot in slots]
            found.append((Flat(length, dtype, device), moved))
        return found

    def _cut(self, states: States) -> tuple[list[Own], States]:
        mine = []
        for number, flat in enumerate(self.flats):
            start, stop = self._slice(number)
            for slot in flat.slots:
                param = self.named[slot.param][1]
                if start <= slot.start < stop and id(param) in self._group_of:
                    parts = (ParamSlice(slot.param, 0, param.numel(), slot.start),)
                    piece = Piece(number, slot.start, slot.stop, parts)
                    mine.append(Own(self._group_of[id(param)], param, piece))
        return mine, {own.tensor: states[own.tensor] for own in mine if own.tensor in states}

    def drop_grads(self) -> None: ...

    def describe(self) -> dict[str, Any]:
        """Tensors of any shape travel whole."""
        found = {}
        for own in self.own:
            words = {
                key: ["whole", dtype_name(value), list(value.shape)]
                if isinstance(value, Tensor) and value.numel() > 1
                else describe({key: value}, torch.Size([-1]))[key]
                for key, value in self.states.get(own.tensor, {}).items()
            }
            found[str(own.piece.parts[0].param)] = words
        return found

    def collect(self, *, keeps: bool = True) -> States:
        whole = self._others()
        transport = self.reducer.transport
        for owner, theirs in enumerate(self._exchange()):
            for number, words in theirs.items():
                param = self.named[int(number)][1]
                state: State = {}
                for key, each in words.items():
                    if each[0] != "whole":
                        state[key] = value_of(each, param)
                        continue
                    _, dtype, shape = each
                    value = torch.empty(shape, dtype=getattr(torch, dtype), device=param.device)
                    if is_root := owner == self.rank:
                        value.copy_(self.states[param][key])
                    what = f"Copying {key!r} of the optimizer's state"
                    broadcast_tensors(transport.copy, [value], owner, what, is_root=is_root)
                    state[key] = value
                if keeps and state:
                    whole[param] = state
        return whole if keeps else {}
