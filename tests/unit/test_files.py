"""Samples in many files: each once per epoch, dealt by arithmetic, and nothing read in vain."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Files
from paceline.data.lanes import DealtFiles, Lanes
from paceline.data.plan import Plan, Portion, shards_of
from paceline.errors import UsageError


class Memory:
    """Files that exist as numbers only, and remember how they are read."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.opened, self.samples = counts, 0, 0

    def count(self, file: int) -> int:
        return self.counts[file]

    def read(self, file: int, start: int) -> Iterator[int]:
        self.opened += 1
        for number in range(sum(self.counts[:file]) + start, sum(self.counts[: file + 1])):
            self.samples += 1
            yield number


def make(counts: list[int], **changed: Any) -> tuple[Files, Plan]:
    options = {"shards": 3, "global_batch": 7, "epochs": 2, "seed": 5, **changed}
    files = Files(
        range(len(counts)),
        Memory(counts),
        window=options.pop("window", 4),
        lanes=options.pop("lanes", 2),
    )
    names = ("shards", "global_batch", "seed", "shuffle", "drop_last")
    lanes = Lanes(
        counts=files.counts,
        lanes=files.lanes,
        window=files.window,
        **{name: options[name] for name in names if name in options},
    )
    return files, Plan(samples=len(files), lanes=lanes, **options)


def load(files: Files, plan: Plan, portions: list[Portion], processes: int) -> list[list[int]]:
    """The batches of a worker, as so many processes load them in turn."""
    assert plan.lanes is not None
    loaders = [DealtFiles(files, plan.lanes) for _ in range(processes)]
    epochs, batches = [-1] * processes, []
    for turn, shard in enumerate(shard for portion in portions for shard in portion.shards):
        who = turn % processes
        if epochs[who] != shard.epoch:
            epochs[who] = shard.epoch
            loaders[who].set_epoch(shard.epoch)
        batches.append(loaders[who].__getitems__(shard.indices))
        assert batches[-1] == shard.indices
    return batches


@st.composite
def datasets(draw: st.DrawFn) -> tuple[Files, Plan]:
    counts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any))
    shards = draw(st.integers(1, 5))
    return make(
        counts,
        shards=shards,
        global_batch=draw(st.integers(2 * shards, 24)),
        seed=draw(st.integers(0, 99)),
        window=draw(st.integers(1, 12)),
        lanes=draw(st.integers(1, 4)),
        shuffle=draw(st.booleans()),
        merge_shards=draw(st.booleans()),
    )


@settings(max_examples=25, deadline=None)
@given(datasets(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.data())
def test_every_sample_is_trained_on_once_per_epoch_whoever_computes_and_loads(
    dataset: tuple[Files, Plan], before: int, after: int, workers: int, data: st.DataObject
) -> None:
    files, plan = dataset
    done = data.draw(st.integers(0, plan.steps))
    seen: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    for first, last, size in ((0, done, before), (done, plan.steps, after)):
        for rank in range(size):
            portions = [p for p in plan.portions(first, rank, size) if p.step <= last]
            mine = len(shards_of(rank, size, plan.shards))
            assert plan.lanes is not None
            n = plan.lanes.processes(workers, mine, is_merged=plan.merge_shards)
            assert 1 <= n <= workers
            load(files, plan, portions, n)
            for portion in portions:
                seen[portion.epoch].update(i for s in portion.shards for i in s.indices)
    assert seen[0] == seen[1] == Counter(range(plan.samples))


def test_a_last_batch_that_is_not_full_can_be_left_out() -> None:
    files, plan = make([9, 11, 13], drop_last=True)
    left_out = []
    for epoch in range(2):
        portions = [p for p in plan.portions(0, 0, 1) if p.epoch == epoch]
        seen = [i for p in portions for s in p.shards for i in s.indices]
        assert len(seen) == len(set(seen)) == 28
        left_out.append(set(range(33)) - set(seen))
        load(files, plan, portions, 2)
    assert left_out[0] != left_out[1]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_nobody_reads_what_another_one_trains_on(size: int, processes: int) -> None:
    counts = [100 + n for n in range(40)]
    read, opened = 0, 0
    for rank in range(size):
        files, plan = make(counts, shards=4, global_batch=16, epochs=1, window=20, lanes=4)
        load(files, plan, list(plan.portions(0, rank, size)), processes)
        memory = files.format
        assert isinstance(memory, Memory)
        read, opened = read + memory.samples, opened + memory.opened
        # Its share, and where a lane begins inside a file nothing before that.
        assert memory.samples <= sum(counts) / size + 16 + 1
    assert sum(counts) <= read <= sum(counts) + 16
    assert opened <= len(counts) + 16


def test_a_step_that_comes_again_and_a_start_in_the_middle_read_one_window_more_at_most() -> None:
    files, plan = make([1000] * 4, shards=1, global_batch=10, window=50, lanes=1)
    assert plan.lanes is not None
    assert isinstance(files.format, Memory)
    dealt = DealtFiles(files, plan.lanes)
    (shard,) = next(plan.portions(207, 0, 1)).shards
    for _ in range(2):
        assert dealt.__getitems__(shard.indices) == shard.indices
    assert files.format.samples <= 2 * (50 + 10)
    assert files.format.opened == 2


def test_samples_are_shuffled_within_windows_and_files_among_each_other() -> None:
    _, plan = make([100] * 10, shards=2, global_batch=20, window=50, lanes=2)
    orders = [
        [i for p in plan.portions(0, 0, 1) if p.epoch == e for i in p.shards[0].indices]
        for e in range(2)
    ]
    assert orders[0] != orders[1]
    assert {i // 100 for i in orders[0]} != {i // 100 for i in orders[1]}
    begin = orders[0][:10] + orders[0][20:30] + orders[0][40:50]  # one lane, in one window
    assert sorted(begin) != begin
    assert max(begin) - min(begin) < 50


def test_files_are_a_dataset_of_their_own() -> None:
    files, _ = make([3, 0, 2])
    files = Files(files.files, files.format, transform=lambda n: -n)
    assert isinstance(files.format, Memory)
    assert [files[i] for i in range(5)] == [0, -1, -2, -3, -4]
    assert files.format.opened == 2
    assert (files[4], files[1], len(files)) == (-4, -1, 5)
    with pytest.raises(IndexError):
        files[5]


@pytest.mark.parametrize(("claimed", "word"), [([3, 5], "fewer"), ([3, 3], "more")])
def test_files_that_have_other_samples_than_were_counted_are_refused(
    claimed: list[int], word: str
) -> None:
    files = Files([0, 1], Memory([3, 4]), counts=claimed)
    with pytest.raises(UsageError, match=f"1 has {word} samples than.* {claimed[1]}"):
        [files[i] for i in range(len(files))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"files": "nowhere/*.tar"}, "no files 'nowhere/"),
        ({"files": []}, "no files"),
        ({"files": 3}, "files.* 3"),
        ({"files": ["a.tar", "b.parquet"]}, "is unknown, or not that of all files"),
        ({"files": ["a.tar.gz"]}, "is unknown, or not that of all files"),
        ({"files": ["a"], "format": object()}, r"has no count"),
        ({"files": ["a.tar"], "counts": [1, 2]}, "1 file and 2 counts"),
        ({"files": ["a.tar"], "counts": [-1]}, "samples in a.tar.* -1"),
        ({"files": ["a.tar"], "window": 0}, "window.* 0"),
        ({"files": ["a.tar"], "lanes": 0}, "lanes.* 0"),
    ],
)
def test_what_is_not_a_list_of_files_is_refused_with_advice(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        Files(**arguments)
    assert raised.value.advice


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("a.tar", "webdataset", "webdataset"),
        ("a.parquet", "pyarrow", "parquet"),
        ("a.arrow", "pyarrow", "parquet"),
    ],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    name: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"need {library}.* not installed") as raised:
        len(Files([name]))
    assert raised.value.advice == f"pip install 'paceline[{extra}]'"


def test_other_files_windows_or_lanes_are_another_order() -> None:
    def describe(**changed: Any) -> str:
        arguments: dict[str, Any] = {"files": ["x/a", "x/b"], "counts": [3, 4], **changed}
        return Files(arguments.pop("files"), Memory([]), **arguments).describe()

    assert describe() == describe(files=["y/a", "y/b"])
    others = [{"files": ["b", "a"]}, {"counts": [4, 3]}, {"window": 9}, {"lanes": 1}]
    assert len({describe(), *(describe(**each) for each in others)}) == 5
