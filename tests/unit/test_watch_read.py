"""Following a run folder: only what is new is read, and the result is that of reading it all."""

from __future__ import annotations

import io
import json
import os
import random
import socket
import sys
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sentences import says
from synthetic_run import BEGAN, synthetic_run, synthetic_trace

from paceline.files.output_log import OutputLog, read_log
from paceline.files.run_folder import (
    EventTail,
    EventWriter,
    RunFolder,
    RunInfo,
    read_info,
    write_info,
)
from paceline.record.stages import write as write_trace
from paceline.show.report import document
from paceline.show.report.collect import RunReader, collect
from paceline.show.report.sentences import waiting_verdict
from paceline.show.report.sketch import SKETCHED, choose_lines
from paceline.show.watch import live
from paceline.show.watch.command import find_paths
from paceline.show.watch.follow import Watched
from paceline.show.watch.machine import read_sockets
from paceline.show.watch.terminal import draw, head


def shown(data: Any) -> dict[str, Any]:
    """Everything a page shows, without when it was made."""
    built = document.build(data)
    found: dict[str, Any] = json.loads(json.dumps({**built, "live": live.build(data)}))
    for section in (found, found["live"]):
        for name in ("made", "t", "silent_s"):
            section.pop(name, None)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_reading_in_pieces_of_any_size_gives_what_one_reading_of_the_whole_gives(
    seed: int, tmp_path: Path
) -> None:
    whole = synthetic_run(tmp_path / "whole" / "run", steps=40, ranks=3, epochs=2)
    growing = RunFolder(tmp_path / "growing" / "run")
    growing.events.mkdir(parents=True)
    content = {rank: whole.events_of(rank).read_bytes() for rank in range(3)}
    sizes, rng = dict.fromkeys(content, 0), random.Random(seed)
    reader = None
    while any(sizes[rank] < len(content[rank]) for rank in content):
        for rank in content:  # cut anywhere, in the middle of lines too
            sizes[rank] += rng.randrange(1, 4000)
            growing.events_of(rank).write_bytes(content[rank][: sizes[rank]])
        reader = reader or RunReader(growing.path)
        reader.read()
    growing.info.write_bytes(whole.info.read_bytes())
    assert reader is not None
    reader.read()
    assert shown(reader.data) == shown(collect(whole.path))
    assert not reader.read()


def test_only_new_bytes_are_read_and_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = b'{"kind":"step","t":1,"rank":0,"step":%d}\n'
    path.write_bytes(line % 1 + (line % 2)[:20])
    tail = EventTail(path)
    assert [event and event["step"] for event in tail.read()] == [1]
    with open(path, "r+b") as file:
        file.write(b"x" * 30)  # what was read is not read again
        file.seek(0, os.SEEK_END)
        file.write((line % 2)[20:] + line % 3)
    assert [event and event["step"] for event in tail.read()] == [2, 3]
    assert list(tail.read()) == []


def test_a_restart_undoes_steps_that_were_read_already(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    reader = None
    for begin, loss in ((0, 5.0), (2, 7.0)):
        with EventWriter(folder, 0) as writer:
            writer.write("start", t=10.0 + begin, size=1, pid=1, host="h", device="cpu", step=begin)
            for step in range(begin + 1, 5):
                facts = {"samples": 1, "seconds": 1.0, "metrics": {"loss": [loss, 1]}}
                writer.write("step", t=10.5 + begin, step=step, epoch=0, **facts)
        reader = reader or RunReader(folder.path)
        reader.read()
    assert [point.mean for point in reader.data.metrics["loss"].points(9)] == [5.0, 5.0, 7.0, 7.0]
    assert shown(reader.data) == shown(collect(folder.path))


@pytest.mark.parametrize("what", ["shorter", "gone", "a link", "a folder"])
def test_a_file_that_shrinks_or_vanishes_is_read_anew(what: str, tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=10, ranks=2, epochs=1)
    reader = RunReader(folder.path)
    reader.read()
    path = folder.events_of(1)
    content = path.read_bytes()
    path.unlink()
    if what == "shorter":
        path.write_bytes(content[:1000])
    elif what == "a link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "a folder":
        path.mkdir()
    reader.read()
    assert shown(reader.data) == shown(collect(folder.path))
    assert (1 in reader.data.ranks) == (what == "shorter")


def test_a_step_that_is_recorded_meanwhile_is_shown(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1, epochs=1)
    reader = RunReader(folder.path)
    reader.read()
    trace = synthetic_trace()
    write_trace(trace, folder.pipeline_of(1))
    assert reader.read()
    assert reader.data.traces == [trace]


def test_a_sketch_shows_what_the_whole_shows_and_follows_what_comes(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=1500, ranks=2, slow_rank=1)
    reader = RunReader(folder.path, most_bytes=0)
    reader.read()
    sketch, exact = reader.data, collect(folder.path)
    one, other = shown(sketch), shown(exact)
    assert one["missing"][0].startswith(SKETCHED)
    assert one["sentences"][:4] == other["sentences"][:4]
    assert one["tiles"] == other["tiles"]
    assert one["checkpoints"] == other["checkpoints"]
    assert one["live"] == other["live"]
    points, dense = (data.metrics["loss"].points(2000) for data in (sketch, exact))
    true = {point.x: point.mean for point in dense}
    assert 200 < len(points) < 1000
    assert all(point.mean == pytest.approx(true[point.x], rel=0.4) for point in points)
    with EventWriter(folder, 0) as writer:
        writer.write("step", t=BEGAN + 99, step=1501, epoch=5, samples=64, seconds=0.1)
    reader.read()
    assert sketch.steps == 1501


def test_the_sums_of_a_sketch_count_what_it_left_out(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=1500, ranks=2, slow_rank=1)
    reader = RunReader(folder.path, most_bytes=0)
    reader.read()
    for rank, exact in collect(folder.path).ranks.items():
        found = reader.data.ranks[rank]
        assert (found.steps, found.samples) == (exact.steps, exact.samples)
        assert found.own_s == pytest.approx(exact.own_s, rel=0.02)
        assert found.phases == pytest.approx(exact.phases, rel=0.05)
    lines = folder.events_of(1).read_bytes().splitlines(keepends=True)
    with open(folder.events_of(1), "ab") as file:  # more than a reading takes
        file.writelines(
            b'{"kind":"step","t":1,"rank":1,"step":%d}\n' % n for n in range(1501, 9001)
        )
        file.write(lines[1].replace(b'"step":1,', b'"step":9001,'))
    reader.read()
    assert reader.data.ranks[1].steps == 9001
    assert reader.data.ranks[1].recent[-1].step == 9001


def test_of_what_is_no_step_a_sketch_has_the_newest_of_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    step, message = b'{"kind":"step","n":%d}\n', b'{"kind":"message","n":%d}\n'
    path.write_bytes(
        b'{"kind":"start"}\n' + b"".join(step % n + message % n for n in range(5000)) + b"{"
    )
    end = path.stat().st_size - 1
    lines = choose_lines(path, 0, end, steps=10, scanned_bytes=2**20)
    said = [line for line in lines if b"message" in line]
    assert lines[0] == b'{"kind":"start"}'
    assert said[-1000:] == [(message % n).strip() for n in range(4000, 5000)]
    assert len(lines) < 1020
    assert sorted(lines, key=path.read_bytes().index) == lines
    few = choose_lines(path, 0, end, steps=10, scanned_bytes=1000)
    assert few[-1] == b'{"kind":"message","n":4999}'
    assert len(few) < 50


def test_a_page_of_a_long_run_says_that_it_is_sketched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = synthetic_run(tmp_path / "run", steps=600, ranks=2)
    with open(folder.events_of(0), "ab") as file:
        file.write(b'{"kind":"step","t":1,"ra')  # it was killed
    monkeypatch.setattr("paceline.show.watch.follow.SKETCHED_ABOVE_BYTES", 2**17)
    monkeypatch.setattr("paceline.show.watch.follow.BATCHES", 1)
    run = Watched([folder.path]).first
    assert run.read()
    assert run.build_live()["step"] == 600
    assert run._build()["missing"][0].startswith(SKETCHED)
    assert not run.read()


def test_what_was_sketched_is_read_exactly_in_pieces_and_then_says_what_a_report_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = synthetic_run(tmp_path / "run", steps=600, ranks=3, slow_rank=1)
    monkeypatch.setattr("paceline.show.watch.follow.SKETCHED_ABOVE_BYTES", 2**17)
    monkeypatch.setattr("paceline.show.watch.follow.BATCHES", 1)
    run = Watched([folder.path]).first
    run.read()
    pieces = 1
    while run.read_exactly():
        pieces += 1
    assert pieces > 3  # so many workers
    assert run._reader.data.notes == {}
    exact, read = shown(collect(folder.path)), shown(run._reader.data)
    assert {**read, "timeline": None} == {**exact, "timeline": None}


def test_memory_stays_flat_however_much_a_run_writes(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=400, ranks=1)
    reader = RunReader(folder.path)
    reader.read()
    lines = folder.events_of(0).read_bytes().splitlines(keepends=True)[100:300]
    tracemalloc.start()
    for _ in range(3):
        with open(folder.events_of(0), "ab") as file:
            file.writelines(lines * 5)
        reader.read()
        after = tracemalloc.get_traced_memory()[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert after < 1_000_000
    assert peak < 2_000_000


def test_a_thousand_workers_are_shown_by_their_extremes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.events.mkdir()
    for rank in range(1000):
        facts = {"size": 1000, "pid": os.getpid(), "host": socket.gethostname(), "step": 0}
        start = {"kind": "start", "t": BEGAN, "rank": rank, **facts}
        step = {"kind": "step", "t": BEGAN + 1, "rank": rank, "step": 1, "samples": 1}
        step["phases"] = {"forward": 0.1 + rank / 1000, "wait": 1.0 - rank / 1000}
        folder.events_of(rank).write_text(json.dumps(start) + "\n" + json.dumps(step) + "\n")
    data = collect(folder.path)
    found = live.build(data)
    workers = [each["worker"] for each in found["workers"]]
    assert len(workers) == 32
    assert {0, 999} <= set(workers)
    assert found["workers_in_all"] == 1000
    assert found["workers"][0]["waits_for"] == 999
    assert found["workers"][0]["waited_s"] == pytest.approx(0.999)
    assert len(json.dumps(found)) < 50_000


def test_the_terminal_says_the_state_in_one_line(tmp_path: Path) -> None:
    run = Watched([synthetic_run(tmp_path / "digits", steps=40, ranks=2).path]).first
    run.read()
    said = head(run.build_live())
    assert said == "digits · finished · step 40 of 40 · epoch 5 of 5 · 2,667 samples/s"


@pytest.mark.parametrize("width", [60, 120])
def test_the_terminal_has_a_row_for_each_worker_at_any_width(width: int, tmp_path: Path) -> None:
    run = Watched([synthetic_run(tmp_path / "digits", steps=40, ranks=3, slow_rank=1).path]).first
    run.read()
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(draw(run.build_live(), width))
    lines = console.export_text().splitlines()
    rows = [line for line in lines if "█" in line and "data" not in line]
    assert [line.split()[:2] for line in rows] == [[str(rank), "40"] for rank in range(3)]
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert any(line.startswith("Worker 1 held ") for line in lines)


def test_a_folder_that_vanishes_leaves_the_page_as_it_was_and_runs_no_more(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=20, ranks=2)
    run = Watched([folder.path]).first
    run.read()
    run.state = "running"  # as long as it is, the page of a training waits for its end
    folder.path.rename(tmp_path / "elsewhere")
    assert not run.read()
    assert run.build_live()["step"] == 20
    assert run.state != "running"


def test_a_folder_in_which_nothing_is_yet_is_shown_when_there_is_something(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    run = Watched([folder.path]).first
    run.read()
    assert (run.build_live()["step"], run.state) == (0, "unknown")
    synthetic_run(tmp_path / "run", steps=20, ranks=2)
    assert run.read()
    assert run.build_live()["step"] == 20


def test_runs_in_different_folders_never_share_a_name(tmp_path: Path) -> None:
    paths = [tmp_path / folder for folder in ("a/x", "b/x-3", "c/x", "d/x")]
    for path in paths:
        RunFolder(path).create()
    watched = Watched(paths)
    assert len({run.name for run in watched.runs}) == 4
    assert [watched.find(run.name) for run in watched.runs] == watched.runs


def test_runs_that_begin_later_in_a_folder_are_found_and_take_the_place_of_none(
    tmp_path: Path,
) -> None:
    watched = Watched([tmp_path], partial(find_paths, [str(tmp_path)]))
    assert [run.path for run in watched.runs] == [tmp_path]
    synthetic_run(tmp_path / "one", steps=20, ranks=2)
    assert watched.refresh()
    assert [run.name for run in watched.runs] == ["one"]
    assert watched.first.path == tmp_path / "one"
    synthetic_run(tmp_path / "two", steps=30, ranks=1)
    assert watched.refresh()
    assert not watched.refresh()
    found = [run.describe() for run in watched.runs]
    assert [(each["name"], each["state"], each["step"]) for each in found] == [
        ("one", "finished", 20),
        ("two", "finished", 30),
    ]
    assert [each["settings"]["workers"] for each in found] == [2, 1]
    assert watched.first.path == tmp_path / "one"


@pytest.mark.parametrize(
    ("pid", "is_here", "silent_s", "state", "alive"),
    [
        (None, True, 0, "running", 2),
        (None, True, 900, "silent", 2),  # it hangs
        (2**22 + 1, True, 0, "killed", 0),
        (1, False, 0, "running", 2),
        (1, False, 900, "silent", None),  # nobody can know
    ],
)
def test_workers_are_alive_whose_processes_are_there(
    pid: int | None, is_here: bool, silent_s: float, state: str, alive: int | None, tmp_path: Path
) -> None:
    pid = pid or os.getpid()
    host = socket.gethostname() if is_here else "elsewhere"
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_info(folder, RunInfo(name="run", created=0.0, updated=0.0, workers=2))
    for rank in range(2):
        with EventWriter(folder, rank) as writer:
            t = time.time() - silent_s
            writer.write("start", t=t, size=2, pid=pid, host=host, device="cpu", step=0)
            writer.write("step", t=t, step=1, samples=1, phases={"forward": 0.1}, queued=rank)
    found = live.build(collect(folder.path))
    assert (found["state"], found["alive"]) == (state, alive)
    assert [each["is_alive"] for each in found["workers"]] == [
        bool(alive) if alive is not None else None
    ] * 2
    assert [each["queued"] for each in found["workers"]] == [0, 1]


def test_log_lines_are_the_last_ones_and_no_links_are_followed(tmp_path: Path) -> None:
    folder = synthetic_run(tmp_path / "run", steps=4, ranks=1)
    log = OutputLog(lambda: str(folder.path))
    log.add((number % 2, b"line %d" % number) for number in range(10_000))
    log.add([(None, b"\x1b[31mall 2 workers\x1b[0m train again")])
    log.close()
    said = live.build(collect(folder.path))["log"]
    assert len(said) == 100
    assert (said[-1]["rank"], said[-1]["text"]) == (None, "all 2 workers train again")
    assert (said[-2]["rank"], said[-2]["text"]) == (1, "line 9999")
    assert [each["text"] for each in read_log(folder, 9, wanted="LINE 9350")] == ["line 9350"]
    for place in (folder.logs, folder.events, folder.pipeline):
        elsewhere = tmp_path / place.name
        if place.exists():
            place.rename(elsewhere)
        place.symlink_to(elsewhere)
    data = collect(folder.path)
    assert (live.build(data)["log"], data.ranks, data.traces) == ([], {}, [])


def test_what_was_printed_is_read_without_colours_and_without_marks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    log = OutputLog(lambda: str(folder.path))
    log.add([(0, b"\x1b[1;31mred\x1b[0m and \x1b_0123abcd\x1b\\marked")])
    log.close()
    assert [each["text"] for each in read_log(folder, 9)] == ["red and marked"]


def running(folder: RunFolder, **changes: Any) -> None:
    """Let a made-up run be one that runs now, in this process."""
    info = read_info(folder)
    assert info is not None
    write_info(folder, replace(info, status="running", **changes))
    for rank in folder.event_ranks():
        with EventWriter(folder, rank) as writer:
            facts = {"pid": os.getpid(), "host": socket.gethostname(), "device": "cpu"}
            writer.write("start", t=BEGAN, step=0, size=info.workers, **facts)


def test_one_verdict_names_the_slow_worker_and_its_steps_now_and_when_it_has_recovered(
    tmp_path: Path,
) -> None:
    folder = synthetic_run(tmp_path / "run", steps=150, ranks=2, slow_rank=1)
    running(folder, steps=600)

    def go_on(steps: range, slow_s: float) -> dict[str, Any]:
        for rank in range(2):
            with EventWriter(folder, rank) as writer:
                for step in steps:
                    phases = {"forward": 0.01 + slow_s * (rank == 0), "wait": 0.01}
                    t = time.time() - 0.01 * (steps.stop - step)
                    writer.write("step", t=t, step=step, samples=64, phases=phases)
        data = collect(folder.path)
        built, now = document.build(data), live.build(data)
        assert now["blame"] == waiting_verdict(data)
        assert built["workers"]["verdict"].startswith(now["blame"])
        assert built["workers"]["look"] == now["blame_look"]
        return now

    past = go_on(range(151, 301), 0.0)
    assert says(past["blame"], "Worker 1 held", "1 to 150", "150 of 300")
    assert past["blame_look"] == "past"
    again = go_on(range(301, 401), 0.02)
    assert says(again["blame"], "Worker 0 holds", "since step 301", "20 ms", "Worker 1 held")
    assert again["blame_look"] == "bad"


@pytest.mark.parametrize(("ago_s", "is_late"), [(0.0, False), (1.5, False), (4.0, True)])
def test_a_run_without_a_step_for_ten_usual_ones_says_so_and_promises_no_end(
    ago_s: float, is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    folder = synthetic_run(tmp_path / "run", steps=20, ranks=2)
    running(folder, steps=1000)
    for rank in range(2):
        with EventWriter(folder, rank) as writer:
            for step in range(21, 41):
                t = now_s - ago_s - 0.05 * (40 - step)
                writer.write("step", t=t, step=step, samples=64, phases={"forward": 0.05})
    found = live.build(collect(folder.path))
    assert found["state"] == "running"
    assert (found["late_s"] > 0, found["eta_s"] is None) == (is_late, is_late)


def test_speed_counts_the_samples_of_a_short_last_batch_as_they_are(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for rank in range(2):
        with EventWriter(folder, rank) as writer:
            for step in range(1, 12):
                samples = 1 if step == 11 else 64
                writer.write("step", t=BEGAN + 0.1 * step, step=step, samples=samples)
    found = live.build(collect(folder.path))
    assert found["samples_per_s"] == pytest.approx(2 * (9 * 64 + 1))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel by netlink")
def test_what_a_process_sends_is_counted_at_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as two:
            before = read_sockets()
            one.sendall(bytes(50_000))
            left = 50_000
            while left:
                left -= len(two.recv(left))
            for end in (one, two):
                name, counted, deadline_s = os.readlink(f"/proc/self/fd/{end.fileno()}"), 0, 20.0
                begin_s = time.monotonic()
                while counted < 50_000 and time.monotonic() - begin_s < deadline_s:
                    counted = read_sockets()[name] - before[name]  # what is sent is acknowledged
                assert 50_000 <= counted < 51_000
