"""A rank's slices, stepped where they outlive it: who is left finishes the step of who dies.

State lies in `kept`. The parameters of all ranks lie in the memory of the transport, where those of
a rank's own slice are new as soon as it has stepped them, and those of others not before all have.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.autograd.graph import increment_version
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.ddp import SummedGradients
from paceline.errors import PeerError
from paceline.group import waiting
from paceline.transport import Flat, SharedBuckets
from paceline.update.cut import in_memory_order, is_cut, piece_at
from paceline.update.exchange import States
from paceline.update.kept import KeptMap, KeptState, cut_lots, has_common_memory
from paceline.update.kind import ELEMENTWISE
from paceline.update.shares import ElementShares, Own

LOOK_S = 0.001


class KeptShares(ElementShares):
    """As `ElementShares`, where that memory is to be had; otherwise no more than that."""

    def __init__(self, reducer: SummedGradients, optimizer: Optimizer, states: States) -> None:
        self.kept: KeptState | None = None
        self._has_looked = False
        self._lots: list[list[Own]] = []
        self._lot: list[Own] | None = None
        self._keys = ELEMENTWISE[type(optimizer)]
        super().__init__(reducer, optimizer, states)

    def _find_memory(self) -> None:
        """All ranks of one host map the memory for the state of all, each touching its own."""
        transport = self.reducer.transport
        if not has_common_memory(transport):
            return
        flats = [
            Flat(flat.memory.numel(), flat.memory.dtype, flat.memory.device) for flat in self.flats
        ]
        places = KeptMap(self.size, flats, self._keys, len(self.named))
        used = sum(flat.nbytes for flat in flats) * len(self._keys)
        what = f"Step {self.reducer.steps - 1}: finding memory for the optimizer's state"
        memory = transport.share(used, places.total_bytes, what)
        if memory is not None and isinstance(self._places, SharedBuckets):
            self.kept = KeptState(memory, places, self.rank, flats, self._keys)
            self.most_numel = places.piece_numel

    def adopt(self, states: States) -> None:
        if not self._has_looked:  # once, with all ranks
            self._has_looked = True
            self._find_memory()
        if self.kept is not None:
            self.kept.load()
        super().adopt(states)
        self.hold()

    def hold(self) -> None:
        """Have the state lie where it outlives this rank."""
        if self.kept is None:
            return
        most = self.kept.places.lot_numel
        numels = [own.piece.stop - own.piece.start for own in self.own]
        self._lots = [[self.own[number] for number in lot] for lot in cut_lots(numels, most)]
        lots = [[(own.piece, self.states[own.tensor]) for own in lot] for lot in self._lots]
        self.kept.hold(lots)
        self.lots = len(lots)

    def open(self, lot: int) -> None:
        if self.kept is not None:
            if lot:
                self.kept.close(lot - 1)
            else:
                self.kept.begin()
            self._lot = self._lots[lot]
            self.kept.open(lot)

    def tensors(self, group: int, params: list[Parameter]) -> list[Parameter]:
        if self._lot is None:
            return super().tensors(group, params)
        mine = [own.tensor for own in self._lot if own.group == group]
        is_last = self._lot is self._lots[-1]
        return [*mine, *(p for p in params if is_last and id(p) not in self._shared)]

    def begin(self) -> None:
        super().begin()
        if self.kept is not None:
            self._enter(self.kept)

    def _enter(self, kept: KeptState) -> None:
        """Wait until all ranks have what they need, so that those left can finish the step."""
        assert isinstance(self._places, SharedBuckets)
        kept.enter()
        what = f"Step {self.reducer.steps - 1}: entering the update"
        try:
            with waiting(self.reducer.membership.group):
                peers, has_left = self._places.peers, self._places.has_left
                peers.wait(lambda: not kept.outside(), kept.outside, has_left, what)
        except PeerError:
            # If all are in, the step goes on: the ranks that are left finish that of the dead.
            if kept.outside():
                kept.leave()
                raise

    def gather(self) -> None:
        if self.kept is None:
            super().gather()
            return
        self.kept.close(self.lots - 1)
        super().gather()
        self.kept.turn += 1

    def withdraw(self) -> None:
        """Tell ranks that wait for this one not to."""
        if self.kept is not None and isinstance(self._places, SharedBuckets):
            self._places.fail()

    def rescue(self, step: Callable[[list[Own], States], None] | None) -> States | None:
        """The state of whole parameters, without ranks that are gone; None if it is not to be had.

        With `step`, which steps pieces with their state, in the middle of an update: those that
        the dead had not stepped are, and parameters become whole.
        """
        if self.kept is None or not isinstance(self._places, SharedBuckets):
            return None
        is_late, places, peers = step is not None, self._places, self._places.peers
        while is_late and (late := self.kept.behind()):
            if all(places.has_left(rank) or peers.is_gone(rank) for rank in late):
                break
            time.sleep(LOOK_S)  # who lives is computing, and comes here too
        states: States = defaultdict(dict)
        mine: list[Own] = []
        todo: list[Own] = []
        for rank in range(self.size):
            found = self.kept.read(rank, self.kept.turn + is_late)
            if found is None or not (is_late or all(each.is_stepped for each in found)):
                return None
            for each in found:
                flat = self.flats[each.flat]
                piece = piece_at(each.flat, flat.slots, each.start, each.stop)
                # What the dead were about to step may be half written there; here it is as before.
                owner = rank if each.is_stepped else self.rank
                values = places.segment.bucket(owner, each.flat)[each.start : each.stop]
                # Copied, because others read the same memory and step the piece as well.
                own = self._take(piece, values.clone() if is_late else values)
                states[own.tensor] = {key: value.clone() for key, value in each.state.items()}
                mine.append(own)
                if not each.is_stepped and self._has_grad(piece.parts[0]):
                    own.tensor.grad = self._join_grads(piece)
                    todo.append(own)
        if step is not None:
            step(todo, states)
            for own in mine:
                piece = own.piece
                self.flats[piece.flat].memory[piece.start : piece.stop] = own.tensor.detach()
            for flat in self.flats:
                flat.copy_out()
                increment_version(flat.params)
        return self._join(mine, states)

    def _join(self, own: Iterable[Own], states: States) -> States:
        """The state of whole parameters, from that of all of their pieces."""
        whole = self._others()
        for each in own:
            for part in each.piece.parts:
                param, layout = self.named[part.param][1], self._layouts[part.param]
                state = whole.setdefault(param, {})
                for key, value in states[each.tensor].items():
                    if not is_cut(key, value, each.tensor.shape):
                        state[key] = value.clone()
                        continue
                    if key not in state:
                        state[key] = torch.empty_strided(*layout, dtype=value.dtype)
                    begin = part.at - each.piece.start
                    into = in_memory_order(state[key], layout)[part.start : part.stop]
                    into.copy_(value[begin : begin + into.numel()])
        return whole
