"""Batch sizes, learning rates and the arithmetic of the noise scale, with their sentences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentences import says
from torch import nn

from paceline.cli import main
from paceline.errors import UsageError
from paceline.islands import forecast_islands
from paceline.policy import (
    LearningRate,
    LearningRateScheduler,
    NoiseEstimate,
    NoiseScale,
    plan_batch,
    plan_global_batch,
)
from paceline.policy.noise import from_shards

# A busy machine is no reason to fail.
unhurried = settings(deadline=None, max_examples=60)


def test_a_device_batch_of_32_is_128_on_four_devices() -> None:
    plan = plan_batch(32, 4, keep="device")
    assert plan.global_batch == 128
    assert plan.rows_by_worker == [32, 32, 32, 32]
    assert "Global batch 128" in plan.sentence
    assert says(plan.sentence, "32 rows of one device")


def test_a_global_batch_of_32_is_8_on_each_of_four_devices() -> None:
    plan = plan_batch(32, 4, keep="global")
    assert plan.global_batch == 32
    assert plan.rows_by_worker == [8, 8, 8, 8]
    assert says(plan.sentence, "each of 4 workers", "8 rows", "learning rate")


@unhurried
@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 40))
def test_rows_add_up_and_fit_in_as_few_passes_as_possible(
    batch: int, workers: int, limit: int
) -> None:
    if workers > batch:
        return
    plan = plan_global_batch(batch, workers, device_limit=limit)
    assert sum(plan.rows_by_worker) == batch
    assert max(plan.rows_by_worker) == plan.rows_per_worker
    assert max(plan.rows_by_worker) - min(plan.rows_by_worker) <= 1
    assert plan.rows_per_pass <= limit
    assert (plan.accumulation - 1) * limit < plan.rows_per_worker <= plan.accumulation * limit


def test_passes_are_counted_for_the_busiest_worker_and_said() -> None:
    plan = plan_global_batch(128, 3, device_limit=10)
    assert plan.rows_by_worker == [43, 43, 42]
    assert plan.accumulation == 5
    numbers = ("128 on 3 workers", "42 or 43 rows", "43 rows", "5 passes", 9)
    assert says(plan.sentence, *numbers)


def test_one_worker_has_no_choice_to_explain() -> None:
    assert plan_batch(32, 1, keep="device") == plan_batch(32, 1, keep="global")
    assert plan_batch(32, 1).sentence == "Global batch 32 on one worker."
    assert plan_global_batch(32, 1).sentence == "Global batch 32 on one worker."


def test_an_epoch_ends_with_a_smaller_step_if_the_rows_do_not_divide() -> None:
    assert plan_global_batch(100, 2).steps_per_epoch(1_000) == 10
    assert plan_global_batch(100, 2).steps_per_epoch(1_001) == 11


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: plan_batch(3, 4), "4 workers cannot share a global batch of 3 rows"),
        (lambda: plan_batch(0, 1), "single_batch.* 0"),
        (lambda: plan_batch(8, 2.0), "workers.* 2.0"),  # type: ignore[arg-type]
        (lambda: plan_batch(8, 2, device_limit=0), "device_limit.* 0"),
        (lambda: plan_batch(8, 2, keep="rows"), "keep.* 'rows'"),  # type: ignore[arg-type]
        (lambda: LearningRate(single_batch=0, global_batch=1), "single_batch.* 0"),
        (lambda: rate(rule="cubic"), "Use one of 'none', 'linear', 'sqrt'"),
        (lambda: rate(decay="cosine"), "Set steps"),
        (lambda: rate(decay="cosine", steps=5, warmup_steps=5), "after 5 steps of warm-up"),
        (lambda: rate(warmup_from=2.0), "from 0 to 1"),
        (lambda: rate(warmup_steps=-1), "warmup_steps.* -1"),
        (lambda: rate(warmup_steps=2.5), "warmup_steps.* 2.5"),
        (lambda: rate(decay="linear", steps=math.inf), "steps.* inf"),
    ],
)
def test_an_impossible_policy_is_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def rate(**changes: Any) -> LearningRate:
    return LearningRate(**{"single_batch": 32, "global_batch": 128, **changes})


@pytest.mark.parametrize(("rule", "scale"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_a_rule_follows_the_global_batch(rule: str, scale: float) -> None:
    assert rate(rule=rule).scale == scale
    assert rate(rule=rule, single_batch=128, global_batch=32).scale == 1 / scale
    assert [rate(rule=rule).factor(step) for step in (0, 1, 99)] == [scale] * 3


def test_a_warm_up_rises_evenly_and_never_begins_at_nothing() -> None:
    warm = rate(rule="linear", warmup_steps=3)
    assert [warm.factor(step) for step in range(5)] == [1.0, 2.0, 3.0, 4.0, 4.0]
    from_single = rate(rule="linear", warmup_steps=2, warmup_from=0.25)
    assert [from_single.factor(step) for step in range(3)] == [2.0, 3.0, 4.0]


@unhurried
@given(st.integers(0, 30), st.integers(1, 100), st.sampled_from(["linear", "cosine"]))
def test_a_decay_falls_from_the_full_height_to_its_end(
    warmup: int, length: int, decay: str
) -> None:
    steps = warmup + length
    falling = rate(rule="sqrt", warmup_steps=warmup, decay=decay, steps=steps, decay_to=0.1)
    factors = [falling.factor(step) for step in range(warmup, steps + 3)]
    assert factors[0] == pytest.approx(2.0)
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(0.2)


def test_the_learning_rate_says_what_it_does() -> None:
    warm = rate(rule="linear", warmup_steps=500).sentence
    assert says(warm, "times 4", "linear rule", "global batch 128", 32, "500 steps")
    assert rate().sentence == "Learning rate as given (global batch 128, found with 32)."
    assert "sqrt rule" in rate(rule="sqrt").sentence
    assert rate(decay="cosine", steps=9).sentence.endswith(", cosine decay until step 9.")


def make_scheduler(policy: LearningRate) -> LearningRateScheduler:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}]
    return LearningRateScheduler(torch.optim.SGD(groups), policy)


def rates_of(scheduler: LearningRateScheduler, steps: int) -> list[list[float]]:
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def test_the_scheduler_gives_every_group_its_own_rate_times_the_factor() -> None:
    policy = rate(rule="linear", warmup_steps=3, decay="cosine", steps=10)
    for step, (weight, bias) in enumerate(rates_of(make_scheduler(policy), 12)):
        assert weight == pytest.approx(0.1 * policy.factor(step))
        assert bias == pytest.approx(0.01 * policy.factor(step))


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_saved_scheduler_goes_on_where_it_was(taken: int) -> None:
    policy = rate(rule="sqrt", warmup_steps=4, decay="linear", steps=20)
    undisturbed = rates_of(make_scheduler(policy), taken + 6)[taken:]
    first = make_scheduler(policy)
    rates_of(first, taken)
    saved = json.loads(
        json.dumps([first.state_dict(), first.optimizer.state_dict()["param_groups"]])
    )
    second = make_scheduler(policy)
    second.load_state_dict(saved[0])
    second.optimizer.load_state_dict({"state": {}, "param_groups": saved[1]})
    assert rates_of(second, 6) == undisturbed


floats = st.floats(-3, 3, allow_nan=False, width=32)


@unhurried
@given(
    st.integers(1, 4).flatmap(
        lambda length: st.lists(
            st.tuples(st.lists(floats, min_size=length, max_size=length), st.integers(1, 50)),
            min_size=2,
            max_size=6,
        )
    )
)
def test_the_noise_of_uneven_shards_is_the_variance_between_groups(
    shards: list[tuple[list[float], int]],
) -> None:
    gradients = torch.tensor([gradient for gradient, _ in shards], dtype=torch.float64)
    rows = torch.tensor([rows for _, rows in shards], dtype=torch.float64)
    whole = (gradients * rows[:, None]).sum(0) / rows.sum()
    between = (rows * (gradients - whole).square().sum(1)).sum() / (len(shards) - 1)
    signal, noise = from_shards(
        len(shards),
        rows.sum().item(),
        (rows * gradients.square().sum(1)).sum().item(),
        whole.square().sum().item(),
    )
    assert noise == pytest.approx(between.item(), abs=1e-9)
    assert signal == pytest.approx((whole.square().sum() - between / rows.sum()).item(), abs=1e-9)


@pytest.mark.parametrize("rows", [[8, 8], [16, 16, 16, 16], [1, 2, 40], [3, 1, 1, 7, 20]])
def test_the_estimates_of_signal_and_noise_are_unbiased(rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    true = torch.linspace(-0.4, 0.6, 10)
    spread = torch.linspace(0.5, 2.0, 10)
    trials = 4_000
    means = [
        true + spread * torch.randn(trials, 10, generator=generator) / math.sqrt(n) for n in rows
    ]
    whole = sum(n * mean for n, mean in zip(rows, means, strict=True)) / sum(rows)
    weighted = sum(n * mean.square().sum(1) for n, mean in zip(rows, means, strict=True))
    found = torch.tensor(
        [
            from_shards(len(rows), sum(rows), w, g)
            for w, g in zip(weighted.tolist(), whole.square().sum(1).tolist(), strict=True)
        ]
    )
    expected = torch.stack([true.square().sum(), spread.square().sum()])
    error = found.std(0) / math.sqrt(trials)
    assert ((found.mean(0) - expected).abs() < 4 * error).all()
    assert (error < 0.05 * expected).all(), "otherwise the line above proves nothing"


def filled(signal: float, noise: float, batch: float, count: int = 10) -> NoiseScale:
    scale = NoiseScale()
    for _ in range(count):
        scale.add(signal, noise, batch)
    return scale


def test_signal_and_noise_are_averaged_before_they_are_divided() -> None:
    scale = NoiseScale()
    for signal in (3.0, -1.0) * 10:
        scale.add(signal, 20.0, 64.0)
    estimate = scale.estimate()
    assert estimate is not None
    assert estimate.noise_scale == pytest.approx(20.0)
    assert estimate.batch == 64.0


def test_the_average_forgets_what_is_long_ago() -> None:
    scale = filled(1.0, 10.0, 32.0, count=100)
    for _ in range(300):
        scale.add(1.0, 1_000.0, 32.0)
    estimate = scale.estimate()
    assert estimate is not None
    assert estimate.noise_scale == pytest.approx(1_000.0, rel=0.01)


def test_too_few_measurements_say_nothing_and_overflows_do_not_count() -> None:
    scale = filled(1.0, 10.0, 32.0, count=4)
    assert scale.estimate() is None
    for broken in (math.nan, math.inf):
        scale.add(broken, 1.0, 32.0)
        scale.add(1.0, broken, 32.0)
    assert scale.measurements == 4


@pytest.mark.parametrize(
    ("noise_scale", "parts"),
    [
        (10_000.0, ["10,000", 128, "still help"]),
        (128.0, ["still help", "25%"]),
        (12.34, [12, 128, "hardly help"]),
        (0.0, ["0%"]),
        (math.inf, ["above anything measurable", 128, "still help"]),
    ],
)
def test_the_advice_says_whether_more_workers_would_help(
    noise_scale: float, parts: list[object]
) -> None:
    assert says(NoiseEstimate(noise_scale, 128.0, 10).advice, *parts)


def test_a_gradient_drowned_in_noise_has_no_finite_scale() -> None:
    estimate = filled(-0.1, 5.0, 8.0).estimate()
    assert estimate is not None
    assert math.isinf(estimate.noise_scale)


def test_the_page_quotes_what_is_really_said() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "policy.md").read_text().split())
    page = page.replace("# ", "")
    warm = rate(rule="linear", warmup_steps=500)
    for said in (
        plan_batch(32, 4, keep="device").sentence,
        plan_batch(32, 4, keep="global").sentence,
        warm.sentence,
        NoiseEstimate(1_900.0, 128.0, 50).advice,
        forecast_islands(step_s=0.15, parameters=34e6, bytes_per_s=2.5e6).sentence,
    ):
        assert said in page
    plan = plan_global_batch(512, 2, device_limit=100)
    assert f"{plan.accumulation} passes of at most {plan.rows_per_pass} rows" in page


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--batch", "0"), ("--batch", "9" * 40), ("--workers", "0"), ("--workers", "1")),
        ("--workers", "1000000000"),
        *(("--rows", "-1"), ("--rows", "0"), ("--parameters", "nan"), ("--parameters", "1e308")),
        *(("--step-ms", "inf"), ("--step-ms", "1e-320"), ("--bandwidth-gbps", "0")),
    ],
)
def test_the_command_refuses_a_number_by_the_name_of_its_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--batch": "8", "--workers": "2", "--parameters": "34e6", "--step-ms": "150"}
    given |= {"--bandwidth-gbps": "1", flag: value}
    assert main(["policy", *(word for pair in given.items() for word in pair)]) == 2
    assert f"{flag} is " in capsys.readouterr().err


def test_the_command_says_whether_islands_pay(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["policy", "--batch", "8", "--workers", "2", "--parameters", "34e6"]
    assert main([*command, "--step-ms", "150", "--bandwidth-gbps", "0.02", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"]["global_batch"], found["islands"]["pays"]) == (16, True)
    assert main(command) == 2
    assert says(capsys.readouterr().err, "--step-ms", "--bandwidth-gbps")
