"""How a batch is split for the replicas, and how their outputs are joined."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.dp.devices import ReplicaDevice
from paceline.dp.scatter_gather import gather, plan_sizes, scatter
from paceline.errors import UsageError

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass(frozen=True)
class Sample:
    x: Tensor
    note: str = "note"


def cpus(count: int) -> list[ReplicaDevice]:
    return [ReplicaDevice(f"cpu:{number}", CPU) for number in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 16, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_without_weights_parts_are_those_of_torch_chunk(rows: int, count: int) -> None:
    expected = [len(part) for part in torch.arange(rows).chunk(count)]
    assert list(plan_sizes(rows, count).values()) == expected


def test_a_hundred_rows_on_two_devices_give_fifty_and_fifty() -> None:
    chunks = scatter((torch.zeros(100, 3),), {}, cpus(2))
    assert [len(chunk.args[0]) for chunk in chunks] == [50, 50]


@pytest.mark.parametrize(
    ("rows", "weights", "expected"),
    [
        (8, [3, 1], {0: 6, 1: 2}),
        (7, [3, 1], {0: 5, 1: 2}),
        (1, [1, 3], {1: 1}),
        (10, [1, 0, 1], {0: 5, 2: 5}),
        (100, [0.5, 0.25, 0.25], {0: 50, 1: 25, 2: 25}),
        (0, [3, 1], {0: 0}),
    ],
)
def test_weights_share_out_the_rows(
    rows: int, weights: list[float], expected: dict[int, int]
) -> None:
    assert plan_sizes(rows, len(weights), weights) == expected


def test_fewer_rows_than_devices_use_fewer_devices() -> None:
    chunks = scatter((torch.arange(3),), {}, cpus(5))
    assert [chunk.args[0].tolist() for chunk in chunks] == [[0], [1], [2]]


def test_an_empty_batch_is_one_empty_chunk() -> None:
    (chunk,) = scatter((torch.zeros(0, 4),), {}, cpus(3))
    assert chunk.args[0].shape == (0, 4)


@pytest.mark.parametrize("dim", [1, -1, -2])
def test_another_dimension_can_be_split_and_joined(dim: int) -> None:
    batch = torch.arange(24).view(2, 4, 3)
    chunks = scatter((batch,), {}, cpus(2), dim)
    joined = gather([chunk.args[0] for chunk in chunks], cpus(2)[: len(chunks)], CPU, dim)
    assert len(chunks) == 2
    torch.testing.assert_close(joined, batch)


def test_containers_of_every_kind_come_apart_and_together_again() -> None:
    x = torch.arange(6.0)
    batch = {
        "tuple": (x, None, 3),
        "list": [x + 1, "text"],
        "named": Pair(x + 2, {"deep": (x + 3,)}),
        "dataclass": Sample(x + 4),
        "ordered": OrderedDict(a=x + 5),
        "default": defaultdict(list, b=[x + 6]),
        "empty": [],
        "flag": True,
    }
    chunks = scatter((batch,), {}, cpus(3))
    assert [chunk.args[0]["named"].right["deep"][0].tolist() for chunk in chunks] == [
        [3, 4], [5, 6], [7, 8],
    ]  # fmt: skip
    joined = gather([chunk.args[0] for chunk in chunks], cpus(3), CPU)
    assert list(joined) == list(batch)
    for key, value in batch.items():
        assert type(joined[key]) is type(value)
    assert joined["named"].right["deep"][0].tolist() == (x + 3).tolist()
    assert joined["dataclass"].x.tolist() == (x + 4).tolist()
    assert joined["default"].default_factory is list
    assert joined["tuple"][1:] == (None, 3)


def test_keyword_inputs_are_split_and_scalars_go_to_everyone() -> None:
    kwargs = {"x": torch.arange(4), "scale": torch.tensor(2.0), "mode": "fast", "n": 7}
    chunks = scatter((), kwargs, cpus(2))
    assert [chunk.kwargs["x"].tolist() for chunk in chunks] == [[0, 1], [2, 3]]
    assert all(chunk.kwargs["scale"] == 2 and chunk.kwargs["n"] == 7 for chunk in chunks)


def test_chunks_on_the_batchs_device_are_views_of_it() -> None:
    batch = torch.zeros(4, 2)
    for chunk in scatter((batch,), {}, cpus(2)):
        chunk.args[0].add_(1)
    assert batch.sum() == 8


def test_inputs_of_different_lengths_are_named_with_their_shapes() -> None:
    with pytest.raises(UsageError) as caught:
        scatter((torch.zeros(16, 3),), {"mask": torch.zeros(1, 3)}, cpus(2))
    for part in ("inputs[0]", "kwargs['mask']", "(16, 3)", "(1, 3)", "expanded"):
        assert part in str(caught.value)


def test_inputs_without_a_tensor_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to split"):
        scatter((3, "text"), {}, cpus(2))
    with pytest.raises(UsageError, match=r"inputs\[0\]"):
        scatter((torch.tensor(1.0),), {}, cpus(2))


def test_an_input_without_the_dimension_is_named() -> None:
    with pytest.raises(UsageError, match=r"inputs\[0\]\['x'\] has.* shape \(4,\)"):
        scatter(({"x": torch.zeros(4)},), {}, cpus(2), dim=1)


def test_losses_without_dimensions_become_a_vector() -> None:
    joined = gather([torch.tensor(1.0), torch.tensor(2.0)], cpus(2), CPU)
    assert joined.tolist() == [1, 2]


def test_outputs_that_cannot_be_joined_are_named_with_their_shapes() -> None:
    outputs = [{"logits": [torch.zeros(2, 5)]}, {"logits": [torch.zeros(2, 6)]}]
    with pytest.raises(UsageError) as caught:
        gather(outputs, cpus(2), CPU)
    for part in ("output['logits'][0]", "(2, 5) from cpu:0", "(2, 6) from cpu:1"):
        assert part in str(caught.value)


def test_outputs_of_different_structure_are_named() -> None:
    with pytest.raises(
        UsageError, match=r"output\['a'\].* not.*\n.*a Tensor from cpu:0, a NoneType"
    ):
        gather([{"a": torch.zeros(1)}, {"a": None}], cpus(2), CPU)
    with pytest.raises(UsageError, match=r"a dict of \['a'\] from cpu:0, a dict of \['b'\]"):
        gather([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], cpus(2), CPU)
    with pytest.raises(UsageError, match=r"a list of \[0\], \[1\] from cpu:0, a list of \[0\]"):
        gather([[None, None], [None]], cpus(2), CPU)


def test_values_that_are_no_tensors_must_agree() -> None:
    assert gather([("text", 2.5), ("text", 2.5)], cpus(2), CPU) == ("text", 2.5)
    with pytest.raises(UsageError, match=r"output\[1\] differs.*\n.*8 from cpu:0, 7 from cpu:1"):
        gather([(None, 8), (None, 7)], cpus(2), CPU)


def test_dictionaries_may_list_the_same_keys_in_another_order() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    joined = gather([{"a": a, "b": b}, {"b": b, "a": a}], cpus(2), CPU)
    assert joined["a"].tolist() == [0, 0]
    assert joined["b"].tolist() == [1, 1]
