"""Pieces give the bits of the whole: for every optimizer, over cuts, without any process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from paceline.ddp.layout import ALIGNMENT_BYTES, Slot
from paceline.transport.interface import ALIGNMENT, round_up, slices
from paceline.update.cut import PIECE_NUMEL, cut_pieces, deal_tensors, likeness, split_piece
from paceline.update.kind import merges
from paceline.update.pieces import step_in_pieces

SHAPES = [(10,), (33, 7), (1,), (130, 3), (), (257,)]
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda p, **form: optim.SGD(p, lr=0.1, weight_decay=0.01, **form),
    "momentum": lambda p, **form: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **form),
    "Adam": lambda p, **form: optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True, **form),
    "AdamW": lambda p, **form: optim.AdamW(p, lr=0.01, **form),
    "Adagrad": lambda p, **form: optim.Adagrad(p, lr=0.01, lr_decay=0.1, **form),
    "RMSprop": lambda p, **form: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **form),
    "NAdam": lambda p, **form: optim.NAdam(p, lr=0.01, **form),
    "RAdam": lambda p, **form: optim.RAdam(p, lr=0.01, **form),
    "Adamax": lambda p, **form: optim.Adamax(p, lr=0.01, **form),
    "Adadelta": lambda p, **form: optim.Adadelta(p, **form),
    "Rprop": lambda p, **form: optim.Rprop(p, lr=0.01, **form),
    "ASGD": lambda p, **form: optim.ASGD(p, lr=0.01, **form),
}
FORMS: dict[str, dict[str, bool]] = {"loop": {}, "foreach": {"foreach": True}}
FORMS["fused"] = {"fused": True}
FUSED = {"SGD", "momentum", "Adam", "AdamW", "Adagrad"}


def draw(generator: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def laid_out(tensors: list[Tensor]) -> tuple[Tensor, list[Slot]]:
    """The tensors in one buffer, at multiples of 64 bytes."""
    slots: list[Slot] = []
    for index, tensor in enumerate(tensors):
        start = round_up(slots[-1].stop if slots else 0, ALIGNMENT_BYTES // tensor.element_size())
        slots.append(Slot(index, start, start + tensor.numel()))
    flat = tensors[0].new_zeros(slots[-1].stop)
    for slot, tensor in zip(slots, tensors, strict=True):
        flat[slot.start : slot.stop] = tensor.reshape(-1)
    return flat, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for form in FORMS for name in OPTIMIZERS if form != "fused" or name in FUSED],
)
def test_stepped_in_the_pieces_of_three_ranks_a_tensor_gets_the_bits_of_the_whole(
    name: str, form: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = draw(generator, dtype)
    whole = [nn.Parameter(tensor.clone()) for tensor in tensors]
    flat, slots = laid_out(tensors)
    can_merge = merges(dtype, is_fused=form == "fused")
    pieces = [
        piece
        for own in slices(flat.numel(), 3)
        for piece in cut_pieces(0, slots, own, [0] * len(slots), merges=can_merge)
    ]
    cut = [nn.Parameter(flat[piece.start : piece.stop]) for piece in pieces]
    optimizers = [OPTIMIZERS[name](params, **FORMS[form]) for params in (whole, cut)]
    for _ in range(6):
        grads = draw(generator, dtype)
        for param, grad in zip(whole, grads, strict=True):
            param.grad = grad
        flat_grad, _ = laid_out(grads)
        for piece, param in zip(pieces, cut, strict=True):
            param.grad = flat_grad[piece.start : piece.stop]
        for optimizer in optimizers:
            optimizer.step()
    for slot, param in zip(slots, whole, strict=True):
        assert torch.equal(flat[slot.start : slot.stop], param.detach().reshape(-1))


@given(
    st.lists(st.integers(1, 3 * PIECE_NUMEL), min_size=1, max_size=8),
    st.integers(1, 5),
    st.booleans(),
    st.data(),
)
def test_every_element_is_in_one_piece_of_one_rank(
    numels: list[int], size: int, can_merge: bool, data: st.DataObject
) -> None:
    kinds = data.draw(st.lists(st.sampled_from([0, 1, None]), min_size=8, max_size=8))
    slots: list[Slot] = []
    for index, numel in enumerate(numels):
        start = round_up(slots[-1].stop if slots else 0, 16)
        slots.append(Slot(index, start, start + numel))
    seen: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(numels))}
    for own in slices(slots[-1].stop, size):
        for piece in cut_pieces(0, slots, own, kinds, merges=can_merge):
            assert own[0] <= piece.start < piece.stop <= own[1]
            assert piece.stop - piece.start <= PIECE_NUMEL + ALIGNMENT
            assert len({kinds[part.param] for part in piece.parts}) == 1
            assert can_merge or len(piece.parts) == 1
            flags = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))[: len(piece.parts)]
            flags += [True] * (len(piece.parts) - len(flags))
            parts = [part for each in split_piece(piece, flags) for part in each.parts]
            assert parts == list(piece.parts)
            for part in piece.parts:
                assert part.at == slots[part.param].start + part.start
                seen[part.param].append((part.start, part.stop))
    for index, numel in enumerate(numels):
        if kinds[index] is None:
            assert not seen[index]
        else:
            assert [0, *(stop for _, stop in seen[index])] == [
                *(start for start, _ in seen[index]),
                numel,
            ]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(1, 5))
def test_whole_tensors_lie_in_the_slices_of_single_ranks(numels: list[int], size: int) -> None:
    length, slots = deal_tensors(numels, size)
    cut = slices(length, size)
    for slot, numel in zip(slots, numels, strict=True):
        assert slot.stop - slot.start == numel
        assert sum(start <= slot.start and slot.stop <= stop for start, stop in cut) == 1
    in_order = sorted(slots, key=lambda slot: slot.start)
    assert all(one.stop <= other.start for one, other in pairwise(in_order))
    assert length // size <= sum(numels) / size + max(numels) + ALIGNMENT * (len(numels) + 1)


def test_parameters_whose_numbers_differ_in_the_last_bit_are_not_stepped_as_one() -> None:
    def like(number: float) -> object:
        state = {"step": torch.tensor(3.0), "product": torch.tensor(number), "m": torch.ones(2, 2)}
        return likeness(state, torch.Size([2, 2]))

    assert like(0.9999) == like(0.9999)
    assert like(0.9999) != like(0.99990004)


def large_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 600), nn.Linear(600, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 20)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # type: ignore[union-attr]
    return model


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 700)).square().sum().backward()
        optimizer.step()


def test_a_whole_update_in_pieces_gives_the_same_bits_and_state() -> None:
    models = [large_model(), large_model()]
    plain, pieced = (optim.AdamW(model.parameters(), lr=0.01) for model in models)
    assert step_in_pieces(pieced)
    assert not step_in_pieces(pieced)  # once is enough
    for model, optimizer in zip(models, (plain, pieced), strict=True):
        train(model, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer)
        optimizer.load_state_dict(saved)
        weight: Any = model[0].weight  # type: ignore[index]
        weight.data = weight.data.clone()
        train(model, optimizer)
    assert len(pieced.state) == 2 + 3
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    states = [optimizer.state_dict()["state"] for optimizer in (plain, pieced)]
    for number, state in states[0].items():
        for key, value in state.items():
            assert torch.equal(value, states[1][number][key]), (number, key)


def test_what_is_small_or_fused_is_left_alone() -> None:
    model = large_model()
    assert not step_in_pieces(optim.AdamW(model.parameters(), fused=True))
    assert not step_in_pieces(optim.Adafactor(model.parameters()))
    assert not step_in_pieces(optim.AdamW(nn.Linear(3, 3).parameters()))
