"""Compressed gradients: how far from the exact mean, how many bytes, what is remembered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import DistributedDataParallel, World
from paceline.errors import UsageError
from paceline.gradients import compress
from paceline.gradients.compress import BF16, FP16, BucketTraffic, Compression, PowerSGD
from paceline.gradients.compress.power_sgd import orthonormal
from paceline.testing import assert_replicas_equal, run_ranks, seeded

FULL = PowerSGD(rank=64, start_step=0, min_ratio=0)
"""As many columns as a matrix has: nothing is left out."""
THIN = PowerSGD(rank=1, start_step=0, min_ratio=0)


class Gradients:
    """A bucket of given gradients, one after the other, as a hook sees it."""

    def __init__(self, gradients: dict[str, Tensor], index: int = 0) -> None:
        self._names = list(gradients)
        self._flat = torch.cat([tensor.reshape(-1) for tensor in gradients.values()])
        parts = self._flat.split([tensor.numel() for tensor in gradients.values()])
        shapes = [tensor.shape for tensor in gradients.values()]
        self._views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._index = index

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._views

    def names(self) -> list[str]:
        return self._names


def reduce_once(state: Compression, gradients: dict[str, Tensor], index: int = 0) -> list[Tensor]:
    bucket = Gradients(gradients, index)
    flat = compress.hook(state, bucket).wait()
    assert flat is bucket.buffer()
    return bucket.gradients()


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reduced(size: int, spec: str | compress.Spec, gradients: list[dict[str, Tensor]]) -> list[Any]:
    """What each rank gets for its gradients, which must be the same bits on all."""

    def body(world: World) -> list[Tensor]:
        return reduce_once(compress.make(spec, world.group), gradients[world.rank])

    results = run_ranks(size, body)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    return results[0]


@pytest.mark.parametrize(("spec", "precision"), [("bf16", 2**-8), ("fp16", 2**-11)])
@pytest.mark.parametrize("size", [1, 2, 3])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-3, 3))
def test_rounded_gradients_are_within_the_precision_of_their_format(
    spec: str, precision: float, size: int, seed: int, exponent: int
) -> None:
    each = [noise(seed + rank, 50) * 10.0**exponent for rank in range(size)]
    (mean,) = reduced(size, spec, [{"w": gradient} for gradient in each])
    exact = torch.stack(each).double().mean(0)
    # One rounding when each is sent, and one for each addition, of what is at most the sum of
    # magnitudes; float16 cannot go below its smallest step.
    bound = torch.stack(each).double().abs().mean(0) * precision * (size + 1) + size * 6e-8
    assert ((mean - exact).abs() <= bound).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_float16_survives_where_the_sum_of_the_ranks_is_beyond_its_range(size: int) -> None:
    each = {"w": torch.full((3,), 60_000.0)}
    (mean,) = reduced(size, FP16(), [each] * size)
    torch.testing.assert_close(mean, each["w"], rtol=2e-3, atol=0)


def test_float16_survives_a_loss_that_is_a_sum_over_many_items() -> None:
    def body(world: World) -> Tensor:
        state = compress.make("fp16", world.group)
        state.weight = lambda: [3e6, 1e6][world.rank]
        (mean,) = reduce_once(state, {"w": torch.full((3,), [6e6, 2e6][world.rank])})
        return mean

    for mean in run_ranks(2, body):  # the reducer multiplies by 2 / 4e6 next
        torch.testing.assert_close(mean, torch.full((3,), 4e6), rtol=1e-3, atol=0)


@pytest.mark.parametrize("spec", ["bf16", "fp16", FULL])
def test_infinities_arrive_so_that_a_scaler_can_see_them(spec: str | PowerSGD) -> None:
    bad = noise(0, 4, 4)
    bad[1, 2] = float("inf")
    (mean,) = reduced(2, spec, [{"w": noise(1, 4, 4)}, {"w": bad}])
    assert not mean.isfinite().all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("spec", ["bf16", "fp16", FULL, PowerSGD(start_step=5)])
def test_every_kind_of_gradient_can_be_reduced(dtype: torch.dtype, spec: str | PowerSGD) -> None:
    each = [{"w": noise(rank, 6, 4, dtype=dtype), "b": noise(9, 4).to(dtype)} for rank in range(2)]
    weight, bias = reduced(2, spec, each)
    assert weight.dtype == dtype
    torch.testing.assert_close(weight, (each[0]["w"] + each[1]["w"]) / 2, atol=0.04, rtol=0.04)
    torch.testing.assert_close(bias, each[0]["b"], atol=0.04, rtol=0.04)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (3, 2, 2, 2), (1, 7), (7, 1)])
def test_powersgd_with_all_columns_is_the_exact_mean(size: int, shape: tuple[int, ...]) -> None:
    each = [{"w": noise(rank, *shape), "b": noise(rank + 9, 3)} for rank in range(size)]
    weight, bias = reduced(size, FULL, each)
    torch.testing.assert_close(weight, sum(g["w"] for g in each) / size, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(bias, sum(g["b"] for g in each) / size)


def test_powersgd_reduces_channels_last_gradients_in_their_own_layout() -> None:
    weights = [noise(rank, 4, 3, 2, 2).to(memory_format=torch.channels_last) for rank in range(2)]

    class ChannelsLast(Gradients):
        def __init__(self, gradient: Tensor) -> None:
            super().__init__({"w": gradient.permute(0, 2, 3, 1)})
            self._views = [self._views[0].permute(0, 3, 1, 2)]

    def body(world: World) -> Tensor:
        bucket = ChannelsLast(weights[world.rank])
        compress.hook(compress.make(FULL, world.group), bucket).wait()
        return bucket.gradients()[0]

    for mean in run_ranks(2, body):
        torch.testing.assert_close(mean, (weights[0] + weights[1]) / 2, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_was_applied_and_what_is_left_out_add_up_to_the_true_gradients(size: int) -> None:
    steps, shape = 40, (8, 6)
    constant = noise(99, *shape)

    def gradient(rank: int, step: int) -> Tensor:
        return constant + 0.3 * noise(1000 * rank + step, *shape)

    def body(world: World) -> tuple[Tensor, Tensor, list[float]]:
        state = compress.make(THIN, world.group)
        applied, true, distances = torch.zeros(shape), torch.zeros(shape), []
        for step in range(steps):
            applied += reduce_once(state, {"w": gradient(world.rank, step)})[0]
            true += sum(gradient(rank, step) for rank in range(world.size)) / world.size
            distances.append(((applied - true).norm() / true.norm()).item())
        left_out = state.averaged_state_dict()["left_out"]["w"]
        return applied + left_out, true, distances

    for total, true, distances in run_ranks(size, body):
        torch.testing.assert_close(total, true, atol=1e-4, rtol=1e-4)
        assert distances[-1] < 0.25 * distances[0]  # one column of six, yet nothing is lost
        assert distances[-1] < 0.15


def test_what_a_rank_keeps_stays_bounded_however_different_the_ranks_are() -> None:
    def body(world: World) -> list[float]:
        state = compress.make(THIN, world.group)
        norms = []
        for step in range(160):
            reduce_once(state, {"w": noise(1000 * world.rank + step, 8, 6)})
            norms.append(state.state_dict()["left_out"]["w"].norm().item())
        return norms

    for norms in run_ranks(2, body):
        assert max(norms[120:]) < 1.5 * max(norms[20:40])  # a random walk doubles meanwhile


def test_left_out_parts_count_once_whatever_the_weights_of_the_steps_are() -> None:
    weights = [[900.0, 100.0], [1.0, 0.0], [0.0, 0.0], [10.0, 500.0], [3.0, 3.0]]
    shape = (6, 5)

    def body(world: World) -> tuple[Tensor, Tensor, float]:
        state = compress.make(THIN, world.group)
        applied, true, largest = torch.zeros(shape), torch.zeros(shape), 0.0
        for step, each in enumerate(weights):
            state.weight = lambda each=each: each[world.rank]
            sums = [noise(10 * step + rank, *shape) * each[rank] for rank in range(2)]
            (mean,) = reduce_once(state, {"w": sums[world.rank].clone()})
            total = sum(each)
            update = mean * (2 / total if total else 0.0)  # what the reducer does next
            applied += update
            true += (sums[0] + sums[1]) / total if total else 0.0
            largest = max(largest, update.abs().max().item())
        return applied + state.averaged_state_dict()["left_out"]["w"], true, largest

    for total, true, largest in run_ranks(2, body):
        torch.testing.assert_close(total, true, atol=1e-4, rtol=1e-4)
        assert largest < 10  # and not a thousand, in the step of one item after one of a thousand


def test_a_step_that_is_not_finite_leaves_no_trace_in_what_is_remembered() -> None:
    def body(world: World) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
        state = compress.make(THIN, world.group)
        reduce_once(state, {"w": noise(world.rank, 6, 4)})
        before = state.state_dict()
        bad = noise(2, 6, 4)
        if world.rank == 1:
            bad[0, 0] = float("nan")
        (spoiled,) = reduce_once(state, {"w": bad})
        assert spoiled.isnan().any()
        after = state.state_dict()
        (next_one,) = reduce_once(state, {"w": noise(world.rank, 6, 4)})
        return before, after, next_one

    for before, after, next_one in run_ranks(2, body):
        assert torch.equal(before["left_out"]["w"], after["left_out"]["w"])
        was, now = (orthonormal(state["directions"]["w"]) for state in (before, after))
        torch.testing.assert_close(was @ was.T, now @ now.T)  # the same directions are looked in
        assert after["directions"]["w"].isfinite().all()
        assert next_one.isfinite().all()


def test_a_gradient_of_zeros_does_not_blind_the_next_step() -> None:
    def body(world: World) -> Tensor:
        state = compress.make(FULL, world.group)
        reduce_once(state, {"w": torch.zeros(5, 3)})
        return reduce_once(state, {"w": noise(world.rank, 5, 3)})[0]

    for mean in run_ranks(2, body):
        torch.testing.assert_close(mean, (noise(0, 5, 3) + noise(1, 5, 3)) / 2, atol=1e-6, rtol=0)


def test_bytes_are_counted_exactly() -> None:
    gradients = {"w": noise(0, 32, 16), "b": noise(1, 32), "small": noise(2, 3, 2)}
    before = 4 * (32 * 16 + 32 + 6)
    factors = 4 * (32 * 2 + 16 * 2 + 32 + 6)

    def body(world: World) -> list[Any]:
        seen = []
        for spec in ("bf16", "fp16", PowerSGD(rank=2, start_step=1)):
            state = compress.make(spec, world.group)
            for _ in range(3):
                reduce_once(state, dict(gradients))
                reduce_once(state, {"w64": noise(3, 5, dtype=torch.float64)}, index=1)
            seen.append((state.bytes_before, state.bytes_sent, state.ratio, state.bytes_by_bucket))
        return seen

    for half, other_half, factored in run_ranks(3, body):
        total = 3 * (before + 40)
        assert half[:3] == (total, 3 * (before // 2 + 10), total / (3 * (before // 2 + 10)))
        assert other_half == half
        assert half[3] == {0: BucketTraffic(before, before // 2), 1: BucketTraffic(40, 10)}
        assert factored[:2] == (total, (before + 40) + 2 * (factors + 40))
        assert factored[3] == {0: BucketTraffic(before, factors), 1: BucketTraffic(40, 40)}


def test_the_message_that_agrees_on_weights_is_counted() -> None:
    def body(world: World) -> list[int]:
        sent = []
        for spec in ("bf16", "fp16", FULL):
            state = compress.make(spec, world.group)
            state.weight = lambda: 1.0
            reduce_once(state, {"b": noise(0, 10)})
            sent.append(state.bytes_sent)
        return sent

    assert run_ranks(2, body) == [[20, 20 + 8, 40 + 8]] * 2


class Small(nn.Module):
    """Several matrices, vectors and a branch, over several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.unsqueeze(1)).squeeze(1)
        out: Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


def task() -> tuple[Tensor, Tensor]:
    x = noise(5, 96, 12)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()


def train(
    world: World, spec: str | compress.Spec | None, steps: int = 60, weighted: bool = False
) -> tuple[list[float], dict[str, Tensor], float, int]:
    """Losses of the whole batch by step, what was learned, the ratio, and how many buckets."""
    module = seeded(Small())
    model = DistributedDataParallel(module, process_group=world.group, bucket_cap_mb=0.004)
    x, y = task()
    cuts = [0, 80, 96] if weighted else [0, 48, 96]
    mine = slice(*cuts[world.rank : world.rank + 2])
    count = cuts[world.rank + 1] - cuts[world.rank]
    state = None
    if spec is not None:
        state = compress.make(spec, world.group)
        state.weight = lambda: float(count) if weighted else 1.0
        model.register_comm_hook(state, compress.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        if weighted:
            with model.weighted(count):
                F.cross_entropy(model(x[mine]), y[mine], reduction="sum").backward()
        else:
            F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        with torch.no_grad():
            losses.append(F.cross_entropy(module(x), y).item())
    ratio, buckets = (state.ratio, len(state.bytes_by_bucket)) if state else (1.0, 0)
    return losses, model.state_dict(), ratio, buckets


@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
def test_training_with_any_compression_learns_as_much_as_without(weighted: bool) -> None:
    def body(world: World) -> list[Any]:
        specs = [None, "bf16", "fp16", "powersgd:rank=2,start_step=5,min_ratio=1"]
        return [train(world, spec, weighted=weighted) for spec in specs]

    ranks = run_ranks(2, body, timeout_s=60)
    for runs in zip(*ranks, strict=True):
        assert_replicas_equal([learned for _, learned, _, _ in runs])
    exact, bf16, fp16, factored = (losses for losses, _, _, _ in ranks[0])
    assert exact[-1] < 0.5 * exact[0]
    assert bf16[-1] == pytest.approx(exact[-1], rel=0.1)
    assert fp16[-1] == pytest.approx(exact[-1], rel=0.05)
    assert exact[0] - factored[-1] > 0.9 * (exact[0] - exact[-1])
    _, _, ratio, buckets = ranks[0][1]
    assert ratio == 2.0
    assert buckets > 2
    assert ranks[0][3][2] > 1.5


def test_weighted_shards_of_different_sizes_give_the_gradient_of_the_whole_batch() -> None:
    x, y = task()
    whole = seeded(Small())
    F.cross_entropy(whole(x), y).backward()

    def body(world: World, spec: compress.Spec) -> list[Tensor]:
        model = DistributedDataParallel(
            seeded(Small()), process_group=world.group, bucket_cap_mb=0.004
        )
        mine = slice(0, 90) if world.rank == 0 else slice(90, 96)
        state = compress.make(spec, world.group)
        state.weight = lambda: float(len(y[mine]))
        model.register_comm_hook(state, compress.hook)
        for _ in range(2):
            model.zero_grad()
            with model.weighted(len(y[mine])):
                F.cross_entropy(model(x[mine]), y[mine], reduction="sum").backward()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    for spec, tolerance in ((BF16(), 0.01), (FP16(), 0.002), (FULL, 1e-5)):
        for gradients in run_ranks(2, body, spec):
            for got, param in zip(gradients, whole.parameters(), strict=True):
                assert param.grad is not None
                scale = param.grad.abs().max().item()
                torch.testing.assert_close(got, param.grad, atol=tolerance * scale, rtol=0.01)


def test_powersgd_goes_on_from_a_saved_state_with_the_same_bits() -> None:
    def body(world: World) -> tuple[list[Tensor], list[Tensor]]:
        def reduce(state: Compression, step: int) -> Tensor:
            return reduce_once(state, {"w": noise(10 * step + world.rank, 8, 6)})[0]

        state = compress.make(THIN, world.group)
        for step in range(3):
            reduce(state, step)
        saved = state.state_dict()
        straight = [reduce(state, step).clone() for step in range(3, 6)]
        resumed = compress.make(THIN, world.group)
        resumed.load_state_dict(saved)
        again = [reduce(resumed, step).clone() for step in range(3, 6)]
        assert resumed.state_dict()["steps"] == state.steps == 6
        assert (resumed.bytes_sent, resumed.bytes_before) == (state.bytes_sent, state.bytes_before)
        return straight, again

    for straight, again in run_ranks(2, body):
        for one, other in zip(straight, again, strict=True):
            assert torch.equal(one, other)


def test_a_state_averaged_over_two_ranks_goes_on_with_three_and_loses_nothing() -> None:
    def begin(world: World) -> tuple[Tensor, dict[str, Any]]:
        state = compress.make(THIN, world.group)
        (applied,) = reduce_once(state, {"w": noise(world.rank, 8, 6)})
        return applied, state.averaged_state_dict()

    (applied, saved), (_, other) = run_ranks(2, begin)
    assert torch.equal(saved["left_out"]["w"], other["left_out"]["w"])

    def go_on(world: World) -> Tensor:
        state = compress.make(PowerSGD(rank=1, start_step=0, min_ratio=0), world.group)
        state.load_state_dict(saved)
        total = applied.clone()
        for _ in range(30):  # no new gradients: only what was left out is still to come
            total += reduce_once(state, {"w": torch.zeros(8, 6)})[0]
        return total

    for total in run_ranks(3, go_on):
        mean = (noise(0, 8, 6) + noise(1, 8, 6)) / 2
        torch.testing.assert_close(total, mean, atol=1e-3, rtol=1e-3)


def test_a_state_of_another_model_is_refused_by_name() -> None:
    def body(world: World) -> None:
        state = compress.make(THIN, world.group)
        reduce_once(state, {"w": noise(0, 8, 6)})
        reduce_once(state, {"w": noise(0, 8, 5)})

    with pytest.raises(UsageError, match=r"'w' is \(8, 6\) .* \(8, 5\) is needed"):
        run_ranks(1, body)
