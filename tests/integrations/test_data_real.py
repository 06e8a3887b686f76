"""Files of real libraries: a ledger of every sample over workers that die, stop and resume."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data import Files, Tar
from paceline.errors import UsageError

MISSING = [
    name
    for name in ("datasets", "pyarrow", "torchdata", "webdataset")
    if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

COUNTS = [30, 17, 25, 1, 40, 9]
SAMPLES, EPOCHS = sum(COUNTS), 2

READ = """
import pathlib
import torch
from paceline.data import Files

here = pathlib.Path(__file__).parent

def number(sample):
    return int(sample["txt"] if "txt" in sample else sample["number"])

def as_tensors(sample):
    x = torch.randn(4, generator=torch.Generator().manual_seed(number(sample)))
    return x + 0.01 * torch.rand(4), (x.sum() > 0).long(), number(sample)  # augmented

def data(kind):
    if kind in ("tar", "parquet", "arrow"):
        return Files(here / f"train-*.{kind}", transform=as_tensors, window=8, lanes=2)
    import datasets
    datasets.disable_progress_bars()
    files = sorted(map(str, here.glob("train-*.parquet")))
    if kind == "streamed":
        stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        return Files.streamed(stream, transform=as_tensors, window=8, lanes=2)
    whole = datasets.Dataset.from_parquet(files, cache_dir=str(here / "cache"))
    return whole.with_transform(lambda rows: {"item": [
        as_tensors({"number": n}) for n in rows["number"]]})
"""
TRAIN = """
import json, os, signal, sys, time
import torch, paceline
from torch import nn
from torch.utils.data import default_collate
from read import data, here

kind, start, killed_in, stopped_in, lost_in = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
paceline.seed_everything(0)
net = nn.Linear(4, 2)

def collate(samples):
    return default_collate([s["item"] if isinstance(s, dict) else s for s in samples])

run = paceline.Run(
    net, torch.optim.SGD(net.parameters(), lr=0.1), data(kind), global_batch=12, epochs=2, shards=4,
    loader_workers=2, folder=here / "run",
    options=paceline.RunOptions(progress="plain", checkpoint_every=4, collate_fn=collate))
rank = int(os.environ.get("RANK", 0))
ledger = open(here / f"ledger.{start}.{rank}.{os.getpid()}", "w")
for step in run:
    seen = []
    with step:
        for x, y, numbers in step.batches():
            mark = here / "killed"
            if step.number == killed_in and rank == 1 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            seen += numbers.tolist()
            step.backward(nn.functional.cross_entropy(run.model(x), y))
    seen = seen[len(seen) - step.local_samples :]  # without those of a step that was begun anew
    print(json.dumps([step.epoch, step.number, seen]), file=ledger, flush=True)
    if step.number == stopped_in and rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    if 0 < stopped_in <= step.number:
        time.sleep(0.1)  # about ten times a second the workers agree whether to stop
    if 0 < lost_in <= step.number and step.number % 4 == 2:  # no checkpoint holds it
        os.kill(os.getpid(), signal.SIGKILL)
torch.save(net.state_dict(), here / f"done.{start}.pt")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as WebDataset's archives, as Parquet and as Arrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import webdataset as wds

    folder, first = tmp_path_factory.mktemp("files"), 0
    for number, count in enumerate(COUNTS):
        numbers = list(range(first, first + count))
        with wds.TarWriter(str(folder / f"train-{number}.tar")) as archive:
            for n in numbers:
                archive.write({"__key__": f"sample{n:04}", "txt": str(n), "cls": n % 3})
        table = pa.table({"number": numbers, "text": [f"sample {n}" for n in numbers]})
        pq.write_table(table, folder / f"train-{number}.parquet", row_group_size=7)
        new = pa.ipc.new_file if number % 2 else pa.ipc.new_stream
        with new(str(folder / f"train-{number}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
        first += count
    return folder


def start(folder: Path, workers: int, *arguments: Any) -> subprocess.CompletedProcess[str]:
    launcher = [] if workers == 1 else ["-m", "paceline", "run", "--workers", str(workers)]
    return subprocess.run(
        [sys.executable, *launcher, "train.py", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize("kind", ["tar", "parquet", "streamed", "map"])
def test_every_sample_is_trained_on_once_per_epoch_over_deaths_stops_and_other_sizes(
    kind: str, files: Path, tmp_path: Path
) -> None:
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "read.py").write_text(READ)
    (tmp_path / "train.py").write_text(TRAIN)
    # Three workers, one of which is killed and replaced; then asked to stop.
    first = start(tmp_path, 3, kind, 1, 4, 7, 0)
    assert first.returncode == 143, first.stdout + first.stderr
    assert (tmp_path / "killed").exists()
    # One alone, killed after a step that no checkpoint holds.
    second = start(tmp_path, 1, kind, 2, 0, 0, 14)
    assert second.returncode == -9, second.stdout + second.stderr
    third = start(tmp_path, 4, kind, 3, 0, 0, 0)
    assert third.returncode == 0, third.stdout + third.stderr
    attempts: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for path in sorted(tmp_path.glob("ledger.*")):
        attempt = int(path.name.split(".")[1])
        for line in path.read_text().splitlines():
            epoch, step, numbers = json.loads(line)
            seen = attempts.setdefault(step, {}).setdefault(attempt, [])
            seen += [(epoch, number) for number in numbers]
    assert [step for step, each in attempts.items() if len(each) > 1], "no step was done again"
    # Of a step that was done again only the last time counts: the first was lost with its start.
    seen = Counter(each for step in attempts.values() for each in step[max(step)])
    assert seen == Counter((epoch, n) for epoch in range(EPOCHS) for n in range(SAMPLES))
    # And each of them in the same step, with the same augmentation, as in a start undisturbed.
    (tmp_path / "run").rename(tmp_path / "before")
    alone = start(tmp_path, 1, kind, 9, 0, 0, 0)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    expected, got = (torch.load(tmp_path / f"done.{n}.pt") for n in (9, 3))
    torch.testing.assert_close(got, expected)


def test_samples_of_an_archive_are_webdatasets_own(files: Path) -> None:
    import webdataset as wds

    def without_path(sample: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in sample.items() if key != "__local_path__"}

    for path in sorted(files.glob("*.tar")):
        theirs = [without_path(s) for s in wds.WebDataset(str(path), shardshuffle=False)]
        assert Tar().count(path) == len(theirs)
        for begin in {0, len(theirs) // 2, len(theirs) - 1}:
            assert list(Tar().read(path, begin)) == theirs[begin:]


@pytest.mark.parametrize("kind", ["tar", "parquet", "arrow"])
def test_a_file_can_be_read_from_any_sample_on(kind: str, files: Path) -> None:
    key = "txt" if kind == "tar" else "number"
    dataset = Files(files / f"train-*.{kind}", transform=lambda sample: int(sample[key]))
    assert dataset.counts == tuple(COUNTS)
    for begin in range(0, SAMPLES, 7):
        dataset[0]
        assert [dataset[n] for n in range(begin, min(begin + 3, SAMPLES))] == list(
            range(begin, min(begin + 3, SAMPLES))
        )


@pytest.mark.parametrize("kind", ["tar", "parquet", "arrow"])
def test_a_damaged_file_is_named(kind: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / f"whole.{kind}").write_bytes((files / f"train-0.{kind}").read_bytes())
    (tmp_path / f"broken.{kind}").write_bytes(b"not what it says" * 100)
    with pytest.raises(UsageError, match=f"broken.{kind}") as raised:
        len(Files(tmp_path / f"*.{kind}"))
    assert raised.value.advice


STATEFUL = """
import json, os, pathlib, signal, sys, time
import torch, paceline
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

start, lost_in = map(int, sys.argv[1:])
here = pathlib.Path(__file__).parent
torch.set_num_threads(1)
net = nn.Linear(4, 2)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 50
    def __getitem__(self, n):
        return torch.randn(4, generator=torch.Generator().manual_seed(n)), n

class Counted(StatefulDataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            print("read", file=ledger, flush=True)
            yield batch

def make(world):
    sampler = paceline.DistributedSampler(Rows(), world.size, world.rank, pad=False)
    return Counted(Rows(), batch_size=4, sampler=sampler, num_workers=2)

ledger = open(here / f"ledger.{start}.{os.environ.get('RANK', 0)}", "w")
run = paceline.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), loader=make, epochs=2,
                   folder=here / "run",
                   options=paceline.RunOptions(progress="plain", checkpoint_every=5))
for step in run:
    with step:
        for x, numbers in step.batches():
            step.backward(run.model(x).square().mean())
    print(json.dumps([step.epoch, step.number, numbers.tolist()]), file=ledger, flush=True)
    if step.number == lost_in:
        run.save()
        break
if lost_in:
    while not list((here / "run" / "checkpoints").glob(f"step-{lost_in:08}.*")):
        time.sleep(0.02)  # it is written in the background
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_stateful_loader_continues_with_the_next_batch_and_reads_nothing_twice(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(STATEFUL)
    assert start(tmp_path, 2, 1, 9).returncode != 0
    second = start(tmp_path, 2, 2, 0)
    assert second.returncode == 0, second.stdout + second.stderr
    seen: Counter[tuple[int, int]] = Counter()
    read = 0
    for path in tmp_path.glob("ledger.*"):
        for line in path.read_text().splitlines():
            if line == "read":
                read += path.name.startswith("ledger.2")
                continue
            epoch, step, numbers = json.loads(line)
            if path.name.startswith("ledger.2") or step <= 9:
                seen.update((epoch, number) for number in numbers)
    assert seen == Counter((epoch, n) for epoch in range(2) for n in range(50))
    assert read == 2 * (14 - 9)  # 7 batches an epoch on each of two workers, 9 of them before
