"""Islands without workers: schedule, bits, the outer step, dealing, and the meeting place."""

from __future__ import annotations

import socket
import tempfile
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import Islands
from paceline.errors import PeerError, SettingError, UsageError
from paceline.islands import (
    IslandPlace,
    Outer,
    Presence,
    Request,
    RoundServer,
    find_place,
    forecast_islands,
)
from paceline.islands.bits import pack, packed_bytes, unpack
from paceline.islands.outer import cut
from paceline.run.islands import IslandPlan
from tests.archipelago import meeting_place
from tests.sentences import says


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"every": 30, "fragments": 4},
        {"every": 30, "delay": 30},
        {"every": 30, "fragments": 3, "delay": 10},
        {"delay": -1},
        {"bits": 4},
        {"outer": "adam"},
        {"lr": 0},
        {"lr": float("nan")},
        {"momentum": 1},
        {"momentum": -0.1},
        {"timeout_s": 0},
        {"evry": 3},
    ],
    ids=str,
)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        Islands(**wrong)
    assert refused.value.advice


@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(0, 7), st.integers(1, 100), st.integers(1, 60)
)
def test_every_fragment_is_exchanged_once_a_round_and_lands_before_the_next_one_begins(
    fragments: int, period: int, delay: int, last: int, step: int
) -> None:
    options = Islands(every=fragments * period, fragments=fragments, delay=delay % period)
    flying: int | None = None
    landed = []
    for now in range(1, last + 1):
        if (began := options.start_landing(now, last)) is not None:
            assert began == flying
            landed.append(began)
            flying = None
        if numbers := options.starts(now, last):
            assert flying is None
            assert all(options.start_before(n, now) < now for n in numbers)
            flying = now if options.delay and now != last else None
    assert flying is None
    begun = [now for now in range(1, last) if options.starts(now, last)]
    assert begun == [now for now in range(1, last) if now % period == 0]
    assert not options.delay or landed == begun
    assert options.starts(last, last) == tuple(range(fragments))
    turns = [options.starts(now, 10**9) for now in range(step, step + options.every)]
    assert sorted(n for numbers in turns for n in numbers) == list(range(fragments))


@pytest.mark.parametrize(("bits", "close"), [(32, 0.0), (16, 1 / 256), (8, 1 / 127)])
@pytest.mark.parametrize("count", [1, 1023, 1024, 5000])
def test_packed_values_come_back_within_their_bits(bits: int, close: float, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    data = pack(values, bits)
    assert data.numel() == packed_bytes(count, values.dtype, bits)
    error = (unpack(data, values, bits) - values).abs().max()
    assert float(error) <= close * float(values.abs().max())


@pytest.mark.parametrize("bits", [16, 8])
def test_what_packing_leaves_out_is_sent_later(bits: int) -> None:
    """A drift far below one unit of the packing arrives in the long run."""
    options = Islands(every=1, outer="sgd", bits=bits)  # type: ignore[arg-type]
    tensor = torch.zeros(4)
    outer = Outer([tensor], [], options)
    step = torch.tensor([1.0, 1e-3, -1e-3, 0.0])
    for number in range(1, 2001):
        tensor += step
        payload = outer.begin(number, (0,))
        outer.finish((0,), [[1.0]], [payload], 0)
        assert outer.fragments[0].rest is not None
    torch.testing.assert_close(tensor, step * 2000, rtol=0.01, atol=0.02)


def test_the_average_is_weighted_by_samples() -> None:
    options = Islands(every=1, outer="sgd")
    tensors = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
    outers = [Outer([tensor], [], options) for tensor in tensors]
    for tensor, value in zip(tensors, (1.0, 4.0), strict=True):
        tensor += value
    sent = [outer.begin(1, (0,)) for outer in outers]
    for own, outer in enumerate(outers):
        shift = outer.finish((0,), [[2.0], [1.0]], sent, own)
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2
    assert float(shift.length) == pytest.approx(2.0 * 3**0.5)
    assert float(shift.drift) == pytest.approx(((3 * 1 + 3 * 4) / 2) ** 0.5)


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("has_moved", [False, True])
def test_an_exchange_in_pieces_is_that_of_the_whole(
    bits: Any, has_moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for piece in (1024, 2**20):
        monkeypatch.setattr("paceline.islands.outer.PIECE", piece)
        draw = torch.Generator().manual_seed(0)
        tensors = [torch.randn(size, generator=draw) for size in (1, 1500, 2001)]
        outer = Outer(tensors, [], Islands(every=4, bits=bits))
        for step in (4, 8):
            sent = []
            for _ in range(2):
                for tensor in tensors:
                    tensor += torch.randn(len(tensor), generator=draw)
                sent.append(outer.begin(step, (0,)))
            for tensor in tensors if has_moved else ():
                tensor += 1.0
            outer.finish((0,), [[2.0], [1.0]], sent, 1, has_moved=has_moved)
        [fragment] = outer.fragments
        rest = torch.zeros(()) if fragment.rest is None else fragment.rest
        found.append([*tensors, fragment.anchor, fragment.velocity, rest])
    # The bytes lie in another order, and the numbers are the same.
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("outer", ["nesterov", "sgd"])
def test_the_outer_step_is_that_of_torch(outer: Any) -> None:
    ours, theirs = torch.zeros(5), torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.8, nesterov=outer == "nesterov")
    loop = Outer([ours], [], Islands(every=1, outer=outer, lr=0.7, momentum=0.8))
    draw = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        move = torch.randn(5, generator=draw)
        ours += move
        loop.begin(step, (0,))
        loop.finish_alone((0,))
        theirs.grad = -move
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach())


def test_the_usual_momentum_is_that_of_torch_with_what_the_rate_has_fallen_by() -> None:
    ours, theirs = torch.zeros(5), torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.SGD([theirs], lr=0.9, momentum=0.85, nesterov=True)
    loop = Outer([ours], [], Islands(every=1))
    draw = torch.Generator().manual_seed(0)
    rates = [0.1, 0.4, 0.4, 0.3, 0.1]
    for step, rate in enumerate(rates, start=1):
        move = torch.randn(5, generator=draw)
        ours += move
        loop.begin(step, (0,), rate, is_last=step == len(rates))
        loop.finish_alone((0,))
        theirs.grad = -move
        momentum = 0.85 * (1 - rate / max(rates[:step])) ** 0.5 if step < len(rates) else 0.0
        optimizer.param_groups[0].update(momentum=momentum, nesterov=momentum > 0)
        if not momentum:  # torch forgets what it has not to add
            optimizer.state[theirs]["momentum_buffer"] = -move
        optimizer.step()
    torch.testing.assert_close(ours, theirs.detach())


def test_steps_done_while_an_exchange_is_on_its_way_are_kept() -> None:
    tensor = torch.zeros(2, dtype=torch.float64)
    outer = Outer([tensor], [], Islands(every=4, outer="sgd", delay=2))
    tensor += 1.0
    payload = outer.begin(4, (0,))
    tensor += 10.0
    other = pack(torch.full((2,), 3.0, dtype=torch.float64), 32)
    outer.finish((0,), [[1.0], [1.0]], [payload, other], 0, has_moved=True)
    assert tensor.tolist() == [12.0, 12.0]
    assert outer.fragments[0].anchor.tolist() == [2.0, 2.0]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data())
def test_fragments_are_neighbours_and_none_is_empty(sizes: list[int], data: Any) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    tensors = [torch.empty(size) for size in sizes]
    groups = cut(tensors, count)
    assert len(groups) == count
    assert all(groups)
    assert [id(t) for group in groups for t in group] == [id(t) for t in tensors]


@given(st.integers(4, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_an_epoch_is_covered_once_by_all_workers_of_all_islands(
    samples: int, islands: int, each: int, size: int
) -> None:
    seen: list[int] = []
    for island in range(islands):
        plan = IslandPlan(
            samples=samples,
            global_batch=islands * each,
            shards=1,
            epochs=1,
            island=island,
            islands=islands,
        )
        for rank in range(size):
            for portion in plan.portions(0, rank, size):
                seen += [index for shard in portion.shards for index in shard.indices]
    assert sorted(seen) == list(range(samples))


def test_what_islands_save_is_the_time_of_the_exchange() -> None:
    """34 million weights at 20 Mbit/s: 136 MB in every step, or 68 MB there and back in 30."""
    slow = forecast_islands(step_s=0.15, parameters=34e6, bytes_per_s=2.5e6)
    assert slow.together_s == pytest.approx(0.15 + 136 / 2.5)
    assert slow.apart_s == pytest.approx(0.15 + 2 * 68 / 2.5 / 30)
    assert (slow.pays, slow.gain > 25) == (True, True)
    assert says(slow.sentence, "136.0 MB", "68.0 MB", "Islands pay")
    fast = forecast_islands(step_s=0.15, parameters=34e6, bytes_per_s=10e9)
    assert (fast.pays, says(fast.sentence, "do not pay")) == (False, True)
    four = forecast_islands(step_s=0.15, parameters=34e6, bytes_per_s=2.5e6, islands=4)
    assert four.apart_s == pytest.approx(0.15 + (3 + 9) * 68 / 2.5 / 30)


@pytest.mark.parametrize(
    "wrong", [{"step_s": 0.0}, {"parameters": -1.0}, {"bytes_per_s": 0.0}, {"islands": 1}], ids=str
)
def test_a_forecast_of_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        forecast_islands(**{"step_s": 0.1, "parameters": 1e6, "bytes_per_s": 1e6, **wrong})


@pytest.mark.parametrize(
    "text", ["2/2@h:1", "0/2", "0/2@", "x", "0/2@host", "-1/2@h:1", "0/2@h:65536", 3, ("0/2@h:1",)]
)
def test_a_place_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(SettingError):
        find_place(text)


def test_a_place_reads_as_it_is_written() -> None:
    assert find_place("1/3@node0:29500") == IslandPlace(1, 3, "node0:29500")
    assert str(find_place("0/2@/tmp/x")) == "0/2@/tmp/x"


class Island:
    """One that talks to the meeting place as a leader does."""

    def __init__(self, address: str, number: int, count: int) -> None:
        self.place = IslandPlace(number, count, address)
        self.presence = Presence(self.place)
        self.presence.renew()

    def join(self, step: int, anchor: str = "", **facts: Any) -> Request:
        head = {"ask": "join", "step": step, "anchor": anchor, "facts": facts, "timeout_s": 60}
        return Request(self.place, head)

    def meet(self, step: int, text: bytes, timeout_s: float = 60, is_last: bool = False) -> Request:
        head = {"ask": "round", "step": step, "weights": [1.0], "timeout_s": timeout_s}
        head["rate"] = 0.5
        return Request(self.place, {**head, "is_last": is_last}, lambda: text)


def answer(request: Request) -> tuple[dict[str, Any], bytes]:
    head, body = request.wait(lambda: False)
    return head, bytes(body)


def test_islands_meet_and_get_what_all_have_sent() -> None:
    with meeting_place(2) as address:
        islands = [Island(address, number, 2) for number in range(2)]
        asked = [island.join(7) for island in islands]
        assert [answer(each)[0] for each in asked] == [{"step": 7, "gives": False}] * 2
        asked = [islands[n].meet(10, text) for n, text in enumerate((b"one", b"two"))]
        for each, others in zip(asked, (b"two", b"one"), strict=True):
            head, body = answer(each)
            assert (head["islands"], head["has_own"], body) == ([0, 1], False, others)
        # The same round again, as a new leader would ask: what was sent first counts.
        assert answer(islands[0].meet(10, b"new"))[1] == b"onetwo"
        for island in islands:
            island.presence.close()


def test_an_island_that_is_behind_or_differs_gets_the_state_of_the_first_that_is_furthest() -> None:
    with meeting_place(3) as address:
        islands = [Island(address, number, 3) for number in range(3)]
        asked = [islands[0].join(5, "a"), islands[1].join(4, "a"), islands[2].join(5, "b")]
        assert answer(asked[0])[0] == {"step": 5, "gives": True}
        Request(islands[0].place, {"ask": "state", "step": 5}, lambda: b"all").wait(lambda: False)
        for each in asked[1:]:
            head, body = answer(each)
            assert (head["step"], head["from"], body) == (5, 0, b"all")
        for island in islands:
            island.presence.close()


def test_a_round_goes_on_without_an_island_that_is_gone_and_it_comes_back_at_the_next() -> None:
    said: list[str] = []
    with meeting_place(2, said.append) as address:
        first, second = (Island(address, number, 2) for number in range(2))
        for each in [first.join(0), second.join(0)]:
            answer(each)
        waiting = first.meet(5, b"a")
        second.presence.close()
        alone = {
            "islands": [0],
            "weights": [[1.0]],
            "rates": [0.5],
            "gives": False,
            "has_own": False,
        }
        assert answer(waiting) == (alone, b"")
        assert len(said) == 1
        second.presence.renew()
        back = second.join(3)
        while not (told := answer(first.meet(10, b"b"))[0])["gives"]:
            assert told["islands"] == [0]
        Request(first.place, {"ask": "state", "step": 10}, lambda: b"state").wait(lambda: False)
        assert answer(back)[1] == b"state"
        both = [first.meet(15, b"c"), second.meet(15, b"d")]
        assert [answer(each)[1] for each in both] == [b"d", b"c"]
        first.presence.close()
        second.presence.close()


def test_nothing_is_said_of_islands_that_leave_when_no_round_comes_any_more() -> None:
    """As when a run is stopped, or was complete already: one of them is always the first."""
    said: list[str] = []
    with meeting_place(2, said.append) as address:
        islands = [Island(address, number, 2) for number in range(2)]
        for each in [island.join(0) for island in islands]:
            answer(each)
        for each in [island.meet(5, b"a") for island in islands]:
            answer(each)
        for island in islands:
            island.presence.close()
    assert said == []


def test_an_island_that_misses_a_deadline_is_late_and_has_to_join_again() -> None:
    with meeting_place(2) as address:
        first, second = (Island(address, number, 2) for number in range(2))
        for each in [first.join(0), second.join(0)]:
            answer(each)
        assert answer(first.meet(5, b"a", timeout_s=0.01))[0]["islands"] == [0]
        assert answer(second.meet(5, b"b"))[0] == {"is_late": True}
        back = second.join(5)
        while not answer(first.meet(10, b"c"))[0]["gives"]:
            pass
        Request(first.place, {"ask": "state", "step": 10}, lambda: b"state").wait(lambda: False)
        assert answer(back)[0]["step"] == 10
        first.presence.close()
        second.presence.close()


def test_islands_with_other_arguments_are_told_the_first_difference() -> None:
    with meeting_place(2) as address:
        first, second = (Island(address, number, 2) for number in range(2))
        for each in [first.join(0, epochs="3"), second.join(0, epochs="3")]:
            answer(each)
        assert answer(second.join(0, epochs="4"))[0] == {"differs": ["epochs", "3", "4"]}
        first.presence.close()
        second.presence.close()


def test_who_comes_when_the_training_is_over_is_told_so() -> None:
    with meeting_place(2) as address:
        first, second = (Island(address, number, 2) for number in range(2))
        for each in [first.join(0), second.join(0)]:
            answer(each)
        second.presence.close()
        answer(first.meet(9, b"a", is_last=True))
        first.presence.close()
        second.presence.renew()
        assert answer(second.join(3))[0] == {"over": True}
        second.presence.close()


def test_who_was_missing_in_the_last_round_gets_the_state_after_it_whenever_it_comes() -> None:
    with meeting_place(2) as address:
        first, second = (Island(address, number, 2) for number in range(2))
        for each in [first.join(0), second.join(0)]:
            answer(each)
        second.presence.close()
        assert answer(first.meet(9, b"a", is_last=True))[0]["gives"]
        Request(first.place, {"ask": "state", "step": 9}, lambda: b"end").wait(lambda: False)
        for has_left in (False, True):
            if has_left:
                first.presence.close()
            second.presence.renew()
            assert answer(second.join(3)) == (
                {"ask": "state", "step": 9, "island": 0, "from": 0},
                b"end",
            )
            second.presence.close()


def test_the_meeting_place_stays_for_an_island_that_missed_the_last_round() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/islands")
        listener.listen()
        server = RoundServer(listener, 2)
        first, second = (Island(f"{folder}/islands", number, 2) for number in range(2))
        for each in [first.join(0), second.join(0)]:
            answer(each)
        second.presence.close()
        answer(first.meet(9, b"", is_last=True))
        Request(first.place, {"ask": "state", "step": 9}, lambda: b"end").wait(lambda: False)
        first.presence.close()
        assert not server.wait_until_left(0.1)
        second.presence.renew()
        assert answer(second.join(3))[1] == b"end"
        second.presence.close()
        assert server.wait_until_left(60.0)
        server.close()


def test_a_round_that_comes_again_after_all_islands_have_died_is_a_new_one() -> None:
    with meeting_place(2) as address:
        islands = [Island(address, number, 2) for number in range(2)]
        for text in (b"before", b"now"):
            for island in islands:
                island.presence.renew()
            for each in [island.join(4) for island in islands]:
                answer(each)
            for each in [island.meet(8, text) for island in islands]:
                assert answer(each)[1] == text
            for island in islands:
                island.presence.close()


def test_an_island_whose_workers_are_gone_does_not_join() -> None:
    with meeting_place(2) as address:
        first, second = (Island(address, number, 2) for number in range(2))
        second.presence.close()
        assert answer(second.join(0))[0] == {"gone": True}
        second.presence.renew()
        both = [first.join(0), second.join(0)]
        assert [answer(each)[0]["step"] for each in both] == [0, 0]
        first.presence.close()
        second.presence.close()


def test_a_wait_ends_where_the_group_of_the_worker_is_broken() -> None:
    with meeting_place(2) as address:
        island = Island(address, 0, 2)
        broken = threading.Event()
        request = island.join(0)
        threading.Timer(0.05, broken.set).start()
        with pytest.raises(PeerError):
            request.wait(broken.is_set)
        island.presence.close()
