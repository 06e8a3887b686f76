"""One step of DataParallel, recorded: what happens to a batch, and watching changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import DataParallel
from paceline.errors import UsageError
from paceline.record import record_step, schema, to_json
from paceline.record.stages import Stage, Trace
from paceline.testing import seeded

X = torch.randn(1_000, 10, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1, keepdim=True) > 0).float()
ROWS = list(range(300, 400))


def net(*layers: nn.Module) -> nn.Module:
    hidden = layers or (nn.ReLU(),)
    return seeded(nn.Sequential(nn.Linear(10, 32), *hidden, nn.Linear(32, 1)))


def record(
    module: nn.Module,
    replicas: int = 2,
    *,
    rows: list[int] = ROWS,
    after_backward: Callable[[Any], None] | None = None,
    **options: Any,
) -> Trace:
    model = DataParallel(module, [f"cpu:{i}" for i in range(replicas)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_step(model, optimizer, dataset=TensorDataset(X, Y), **options) as recording:
        recording.note_batch(rows)
        loss = F.binary_cross_entropy_with_logits(model(X[rows]), Y[rows])
        recording.note_loss(loss)
        torch.autograd.backward(loss)
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
    assert recording.trace is not None
    return recording.trace


def shapes(stage: Stage) -> list[list[int]]:
    return [part.tensors[0].shape for part in stage.parts]


def by_name(trace: Trace) -> dict[str, Stage]:
    return {stage.name: stage for stage in trace.stages}


def test_the_stages_and_shapes_are_those_of_a_batch_of_100_on_two_devices() -> None:
    trace = record(net())
    assert [(stage.name, shapes(stage)) for stage in trace.stages] == [
        ("data", [[1_000, 10]]),
        ("batch", [[100, 10]]),
        ("split", [[50, 10], [50, 10]]),
        ("copy", [[], []]),
        ("forward", [[50, 1], [50, 1]]),
        ("gather", [[100, 1]]),
        ("loss", [[]]),
        ("backward", [[385]]),
        ("update", [[385]]),
    ]
    assert trace.devices == ["cpu:0", "cpu:1"]
    assert [part.worker for part in by_name(trace)["forward"].parts] == [0, 1]
    assert schema.from_json(json.loads(json.dumps(to_json(trace)))) == trace


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_step_is_the_same_as_in_one_process_on_the_whole_batch(replicas: int) -> None:
    check = record(net(), replicas).check
    assert check is not None
    assert (check.how, check.is_same) == ("whole batch", True)
    assert check.difference is not None
    assert check.difference < 1e-5
    assert check.text.startswith("same as one process on the whole batch: difference ")


@pytest.mark.parametrize("scale", [1.01, 0.0, -1.0])
def test_gradients_that_are_not_right_are_noticed(scale: float) -> None:
    module = net()
    parameter = next(module.parameters())

    def spoil(spoiled: Any) -> None:
        spoiled.grad.mul_(scale)

    handle = parameter.register_post_accumulate_grad_hook(spoil)
    check = record(module).check
    handle.remove()
    assert check is not None
    assert check.is_same is False
    assert check.gradients == check.difference
    assert check.difference > 1e-4
    assert check.text.startswith("NOT the same as one process")


def test_outputs_that_are_not_right_are_noticed() -> None:
    class Odd(nn.Module):
        """Gives something else where it sees half of the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + float(len(x) == 50)

    check = record(Odd()).check
    assert check is not None
    assert check.how == "part by part"
    assert "treats the rows of a batch together" in check.reason


def test_an_update_that_is_not_right_is_noticed() -> None:
    module = net()
    model = DataParallel(module, ["cpu:0", "cpu:1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: module[0].bias.data.add_(1.0))
    with record_step(model, optimizer) as recording:
        model(X[:100]).square().mean().backward()
        optimizer.step()
    assert recording.trace is not None
    check = recording.trace.check
    assert check is not None
    assert check.is_same is False
    assert check.parameters == pytest.approx(1.0, abs=1e-3)


def test_watching_changes_no_bit_of_the_result() -> None:
    watched, plain = net(), net()
    record(watched)
    model = DataParallel(plain, ["cpu:0", "cpu:1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.binary_cross_entropy_with_logits(model(X[ROWS]), Y[ROWS]).backward()
    optimizer.step()
    for one, two in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("sample", [300, 349, 350, 399])
def test_a_sample_is_followed_through_all_stages(sample: int) -> None:
    trace = record(net(), sample=sample, values=True)
    assert trace.sample is not None
    row = sample - 300
    stops = {stop.stage: (stop.worker, stop.row) for stop in trace.sample.stops}
    assert stops == {
        "data": (None, sample),
        "batch": (None, row),
        "split": (row // 50, row % 50),
        "forward": (row // 50, row % 50),
        "gather": (None, row),
    }
    values = {stop.stage: stop.values for stop in trace.sample.stops}
    assert values["split"] == X[sample][:6].tolist()
    with torch.no_grad():
        expected = net()(X[sample : sample + 1]).reshape(-1).tolist()
    assert values["gather"] == values["forward"] == pytest.approx(expected, abs=1e-6)


def test_a_sample_that_is_not_in_the_batch_is_not_followed() -> None:
    assert record(net(), sample=7).sample is None


def test_a_weight_is_followed_and_the_replicas_gradients_add_up() -> None:
    module = net()
    before = module[0].weight[3, 1].item()
    trace = record(module, weight="0.weight[3, 1]", values=True)
    assert trace.weight is not None
    numbers = {stop.what: stop.by_worker or [] for stop in trace.weight.stops}
    assert numbers["value"] == [before, before]
    assert len(numbers["gradient"]) == 2
    assert sum(numbers["gradient"]) == pytest.approx(numbers["summed gradient"][0], abs=1e-7)
    assert numbers["new value"] == [module[0].weight[3, 1].item()]
    assert numbers["new value"][0] == pytest.approx(before - 0.1 * numbers["summed gradient"][0])


def test_batch_normalisation_is_explained_rather_than_called_wrong() -> None:
    check = record(net(nn.BatchNorm1d(32), nn.ReLU())).check
    assert check is not None
    assert (check.how, check.is_same) == ("part by part", True)
    assert "BatchNorm1d normalises each part by its own rows" in check.reason


def test_random_numbers_of_threads_are_not_called_wrong() -> None:
    # Replicas share a generator: whether what each drew can be drawn again is a matter of luck.
    check = record(net(nn.Dropout(0.5))).check
    assert check is not None
    assert (check.how, check.is_same) in [("not computed", None), ("part by part", True)]
    assert "random numbers" in check.reason
    alone = record(net(nn.Dropout(0.5)), 1).check
    assert alone is not None
    assert alone.is_same


def test_the_loss_on_the_replicas_is_recorded_without_a_gather() -> None:
    model = DataParallel(net(), ["cpu:0", "cpu:1", "cpu:2"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_step(model, optimizer) as recording:
        loss = model.backward(F.binary_cross_entropy_with_logits, X[ROWS], Y[ROWS])
        recording.note_loss(loss)
        optimizer.step()
    trace = recording.trace
    assert trace is not None
    assert [s.name for s in trace.stages] == [
        "split",
        "copy",
        "forward",
        "loss",
        "backward",
        "update",
    ]
    assert shapes(trace.stages[0]) == [[34, 10], [34, 10], [32, 10]]
    assert trace.check is not None
    assert trace.check.is_same
    assert trace.check.how == "whole batch"


def test_gradients_accumulated_over_micro_batches_are_one_step() -> None:
    model = DataParallel(net(), ["cpu:0", "cpu:1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record_step(model, optimizer) as recording:
        for rows in (slice(0, 30), slice(30, 100)):
            model(X[rows]).square().sum().backward()
        optimizer.step()
    trace = recording.trace
    assert trace is not None
    assert trace.workers == 2
    assert shapes(by_name(trace)["split"]) == [[15, 10], [15, 10]]  # the first pass is drawn
    assert trace.check is not None
    assert (trace.check.how, trace.check.is_same) == ("whole batch", True)


def test_parts_in_one_memory_are_not_copied_and_copies_of_the_model_are_counted() -> None:
    from paceline.dp import DPOptions

    shared = by_name(record(net()))
    assert (shared["split"].bytes_moved, shared["copy"].bytes_moved) == (0, 0)
    assert shared["gather"].bytes_moved == 400
    options = DPOptions(share_parameters=False)
    model = DataParallel(net(), ["cpu:0", "cpu:1", "cpu:2"], options=options)
    with record_step(model) as recording:
        model(X[:90]).sum().backward()
    assert recording.trace is not None
    copied = by_name(recording.trace)
    assert copied["copy"].bytes_moved == 2 * 385 * 4
    assert recording.trace.check is not None
    assert recording.trace.check.is_same


def test_without_values_no_value_is_kept() -> None:
    trace = record(net(), sample=350, weight="2.weight[0, 7]")
    assert not trace.has_values
    for stage in trace.stages:
        for part in stage.parts:
            for facts in part.tensors:
                assert facts.first is None or facts.name == "loss"
    assert trace.sample is not None
    assert trace.weight is not None
    assert all(stop.values is None for stop in trace.sample.stops)
    assert all(stop.by_worker is None for stop in trace.weight.stops)
    assert by_name(trace)["batch"].parts[0].tensors[0].stats is not None


def test_statistics_of_a_few_numbers_are_values_too() -> None:
    trace = record(net(), rows=[1, 2, 3])
    outputs = [part.tensors[0] for part in by_name(trace)["forward"].parts]
    assert [facts.shape for facts in outputs] == [[2, 1], [1, 1]]
    assert [facts.stats for facts in outputs] == [None, None]


def test_the_file_is_in_the_run_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trace = record(net(), folder=folder, step=12)
    assert schema.read(folder / "pipeline" / "step12.json") == trace
    assert folder.stat().st_mode & 0o777 == 0o700


def test_clipped_gradients_are_no_difference() -> None:
    def clip(model: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    check = record(net(), after_backward=clip).check
    assert check is not None
    assert check.is_same
    assert check.parameters == 0.0


def test_gradients_from_before_the_step_are_named_as_the_reason() -> None:
    model = DataParallel(net(), ["cpu:0", "cpu:1"])
    model(X[:10]).sum().backward()
    with record_step(model) as recording:
        model(X[:10]).sum().backward()
    assert recording.trace is not None
    assert recording.trace.check is not None
    assert recording.trace.check.is_same is None
    assert "zero_grad()" in recording.trace.check.reason


def raise_in_backward(output: Tensor) -> None:
    output.register_hook(lambda _: 1 / 0)
    output.sum().backward()


def test_an_error_in_the_step_passes_and_leaves_no_hook() -> None:
    module = net()
    model = DataParallel(module, ["cpu:0", "cpu:1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError), record_step(model, optimizer):
        raise_in_backward(model(X[:10]))
    for each in (model, module):
        assert not each._forward_hooks
        assert not each._forward_pre_hooks
    assert not any(param._backward_hooks for param in module.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight": "0.wieght[0, 0]"}, "did you mean '0.weight'?"),
        ({"weight": "0.weight[32, 0]"}, "whose shape is (32, 10)"),
        ({"weight": "0.weight[0]"}, "not one element"),
        ({"weight": "0.weight[-1, 0]"}, "not one element"),
        ({"weight": "[0]"}, "no trained parameter"),
        ({"step": 0}, "counted from 1"),
        ({"folder": "my run"}, "cannot be named 'my run'"),
    ],
)
def test_nonsense_is_refused_before_the_step(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        record(net(), **options)
    assert words in str(caught.value)


def test_a_bare_model_is_refused() -> None:
    with pytest.raises(UsageError, match="Wrap the model"):
        with record_step(net()):
            pass


def test_a_block_without_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match="not called"):
        with record_step(DataParallel(net(), ["cpu:0"])):
            pass
