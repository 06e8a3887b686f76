"""A rank's share of the parameters: the tensors that it steps, and what they are cut from.

Two ways, by what the optimizer's step depends on. `ElementShares`: the parameters live in buffers
laid out as the buckets of their gradients, and a rank steps its slice of each, in pieces.
`TensorShares`: every parameter is stepped, whole, by one rank. Either way the slices of a buffer
are the transport's, so that one call gathers it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline import comm
from paceline.ddp.checks import broadcast_tensors
from paceline.gradients.buffer import Bucket
from paceline.gradients.plan import Slot
from paceline.gradients.reducer import Reducer
from paceline.transport import place
from paceline.transport.flat import Flat, slices
from paceline.update.cut import Part, Piece, cut_pieces, deal_tensors, split_piece
from paceline.update.exchange import States
from paceline.update.flat_params import FlatParams
from paceline.update.kind import merges
from paceline.update.sharded_state import (
    State,
    cut_state,
    describe,
    in_memory_order,
    likeness,
    split_state,
    value_of,
)

Named = tuple[str, Parameter]


@dataclass(slots=True, eq=False)
class Own:
    """Something that this rank steps, and the group of the optimizer that it is in."""

    group: int
    tensor: Parameter
    piece: Piece


class FlatShares(ABC):
    """The parameters of a model in flat buffers, and this rank's share of them.

    Made by all ranks at one point. What no bucket averages (sparse gradients, frozen and empty
    parameters) is not in it: every rank steps that as it is.
    """

    def __init__(self, reducer: Reducer, optimizer: Optimizer, states: States) -> None:
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
        self._index = {id(param): number for number, (_, param) in enumerate(self.named)}
        what = f"Step {reducer.steps - 1}: finding memory for the parameters"
        self._places = place(reducer.transport, [flat for flat, _ in plan], what)
        self.flats = [
            FlatParams(_memory(flat, home), slots, [self.named[slot.param] for slot in slots])
            for (flat, slots), home in zip(plan, self._places.homes, strict=True)
        ]
        self.place_of = {
            slot.param: (number, slot, layout)
            for number, flat in enumerate(self.flats)
            for slot, layout in zip(flat.slots, flat.layouts, strict=True)
        }
        """By parameter, the number of its buffer, its slot there, and how it lies in memory."""
        self._params = [param for flat in self.flats for param in flat.params]
        self.own: list[Own] = []
        self.states: States = {}
        """What the optimizer keeps here."""
        self.adopt(states)

    def adopt(self, states: States) -> None:
        """Take this rank's share of the parameters, and of their state."""
        self.own, mine = self._cut(states)
        shared = self._index.keys() & self._group_of.keys()
        rest = {key: state for key, state in states.items() if id(key) not in shared}
        self.states = defaultdict(dict, {**mine, **rest})

    @abstractmethod
    def _plan(self) -> list[tuple[Flat, list[Slot]]]:
        """Name the parameters, and lay them out in buffers."""

    @abstractmethod
    def _cut(self, states: States) -> tuple[list[Own], States]:
        """What this rank steps, and its part of the state of whole parameters."""

    @abstractmethod
    def collect(self, states: States, *, keeps: bool = True) -> States:
        """The state of whole parameters, from all ranks' shares of it; all of them call this.

        A rank that does not keep the result takes part without the memory for it.
        """

    @abstractmethod
    def bring_grads(self) -> None:
        """Have the gradients where the tensors of this share look for them."""

    @abstractmethod
    def drop_grads(self) -> None:
        """The step is over."""

    def begin(self) -> None:
        for flat in self.flats:
            flat.take_in()
        self.bring_grads()

    def tensors(self, group: int, params: Sequence[Parameter]) -> list[Parameter]:
        """What this rank steps of a group of parameters."""
        mine = [own.tensor for own in self.own if own.group == group]
        return [*mine, *(param for param in params if id(param) not in self._index)]

    def gather(self) -> None:
        """Make every parameter whole again, after each rank has stepped its share."""
        what = f"Step {self.reducer.steps - 1}: gathering the new parameters"
        under_way = [
            self._places.gather(number, flat.memory, what) for number, flat in enumerate(self.flats)
        ]
        with comm.waiting(self.reducer.membership.group):
            for gathering in under_way:
                gathering.wait()
        for flat in self.flats:
            flat.hand_out()
        increment_version(self._params)  # autograd is to notice, as after any update in place

    def describe(self, states: States) -> dict[str, Any]:
        """This rank's part of the state in words, by parameter."""
        found: dict[str, Any] = {}
        for own in self.own:
            if state := states.get(own.tensor):
                words = describe(state, own.tensor.shape)
                found.update({str(part.param): words for part in own.piece.parts})
        return found

    def _slice(self, number: int) -> tuple[int, int]:
        """This rank's slice of a buffer."""
        return slices(self.flats[number].memory.numel(), self.size)[self.rank]

    def _exchange(self, states: States) -> list[dict[str, Any]]:
        group, device = self.reducer.membership.group, self.reducer.buckets[-1].plan.device
        what = "optimizer.state_dict() of an update that is shared out"
        self.reducer.meet(what)
        return comm.exchange(group, self.describe(states), comm.word_device(group, device), what)

    def _others(self, states: States) -> States:
        """What does not belong to parameters in the buffers."""
        mine = {id(own.tensor) for own in self.own}
        return {key: state for key, state in states.items() if id(key) not in mine}


class ElementShares(FlatShares):
    """Every rank steps its slice of each buffer, in pieces."""

    def __init__(self, reducer: Reducer, optimizer: Optimizer, states: States) -> None:
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
            pieces = cut_pieces(number, flat.slots, own_slice, kinds, merges=can_merge)
            for piece in pieces:
                own = self._take(piece)
                mine.append(own)
                params = [self.named[part.param][1] for part in piece.parts]
                if states.get(params[0]):
                    layouts = [self.place_of[part.param][2] for part in piece.parts]
                    cut[own.tensor] = cut_state(piece, [states[p] for p in params], layouts)
        return mine, cut

    def _take(self, piece: Piece) -> Own:
        tensor = Parameter(self.flats[piece.flat].memory[piece.start : piece.stop])
        return Own(self._group_of[id(self.named[piece.parts[0].param][1])], tensor, piece)

    def bring_grads(self) -> None:
        """Views of the buckets, where those hold what the parameters have; else copies."""
        moved = set()
        for number, bucket in enumerate(self._buckets):
            if not bucket.is_handed_out():
                moved.add(number)
        if moved:
            self._split_mixed(moved)
        for own in self.own:
            piece = own.piece
            if piece.flat not in moved:
                own.tensor.grad = self._buckets[piece.flat].flat[piece.start : piece.stop]
            elif self._has_grad(piece.parts[0]):
                own.tensor.grad = self._join_grads(piece)

    def _has_grad(self, part: Part) -> bool:
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

    def _grad(self, part: Part) -> Tensor:
        grad = self.named[part.param][1].grad
        assert grad is not None  # a piece has a gradient in all of its parts, or in none
        dense = grad.to_dense() if grad.layout is not torch.strided else grad
        return in_memory_order(dense, self.place_of[part.param][2])[part.start : part.stop]

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
        self.own = own

    def drop_grads(self) -> None:
        for own in self.own:
            own.tensor.grad = None

    def collect(self, states: States, *, keeps: bool = True) -> States:
        words_by_param: dict[int, dict[str, Any]] = {}
        for theirs in self._exchange(states):
            words_by_param |= {int(number): words for number, words in theirs.items()}
        whole: States = self._others(states)
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
            for key, dtype in sorted(found):
                buffer = self._gather_state(number, states, key, getattr(torch, dtype))
                for slot, layout in zip(flat.slots, flat.layouts, strict=True):
                    words = words_by_param.get(slot.param, {})
                    if keeps and words.get(key) == ["cut", dtype]:
                        part = buffer[slot.start : slot.stop].as_strided(*layout)
                        whole[self.named[slot.param][1]][key] = part.clone()
        return whole if keeps else {}

    def _gather_state(self, number: int, states: States, key: str, dtype: torch.dtype) -> Tensor:
        """One kind of tensor of the state, for a whole buffer."""
        memory = self.flats[number].memory
        buffer = torch.zeros(memory.numel(), dtype=dtype, device=memory.device)
        for own in self.own:
            value = states.get(own.tensor, {}).get(key)
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
                    parts = (Part(slot.param, 0, param.numel(), slot.start),)
                    piece = Piece(number, slot.start, slot.stop, parts)
                    mine.append(Own(self._group_of[id(param)], param, piece))
        return mine, {own.tensor: states[own.tensor] for own in mine if own.tensor in states}

    def bring_grads(self) -> None: ...

    def drop_grads(self) -> None: ...

    def describe(self, states: States) -> dict[str, Any]:
        """Tensors of any shape travel whole."""
        found = {}
        for own in self.own:
            words = {
                key: ["whole", str(value.dtype).removeprefix("torch."), list(value.shape)]
                if isinstance(value, Tensor) and value.numel() > 1
                else describe({key: value}, torch.Size([-1]))[key]
                for key, value in states.get(own.tensor, {}).items()
            }
            found[str(own.piece.parts[0].param)] = words
        return found

    def collect(self, states: States, *, keeps: bool = True) -> States:
        whole = self._others(states)
        transport = self.reducer.transport
        for owner, theirs in enumerate(self._exchange(states)):
            for number, words in theirs.items():
                param = self.named[int(number)][1]
                state: State = {}
                for key, each in words.items():
                    if each[0] != "whole":
                        state[key] = value_of(each, param)
                        continue
                    _, dtype, shape = each
                    value = torch.empty(shape, dtype=getattr(torch, dtype), device=param.device)
                    if owner == self.rank:
                        value.copy_(states[param][key])
                    what = f"Copying {key!r} of the optimizer's state"
                    broadcast_tensors(
                        lambda flat, owner=owner, what=what: transport.copy(flat, owner, what),  # type: ignore[misc]
                        [value],
                        is_root=owner == self.rank,
                    )
                    state[key] = value
                if keeps and state:
                    whole[param] = state
        return whole if keeps else {}


def _memory(flat: Flat, home: Tensor | None) -> Tensor:
    if home is not None:
        return home
    return torch.zeros(flat.numel, dtype=flat.dtype, device=flat.device)
