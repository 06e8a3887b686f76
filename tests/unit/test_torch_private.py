"""The one home of torch's private names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline.torch_private as private
from paceline.errors import MissingLibraryError
from paceline.torch_private import abort_together
from paceline.torch_private.lookup import find


@pytest.mark.parametrize("name", private.__all__)
def test_the_installed_torch_has_every_name(name: str) -> None:
    assert getattr(private, name) is not None


def test_a_name_that_is_missing_is_named_with_the_versions_that_have_it() -> None:
    with pytest.raises(MissingLibraryError, match=r"_foreach_nothing") as caught:
        find("torch._foreach_nothing")
    assert str(torch.__version__) in str(caught.value)
    assert "torch 2.11 to 2.15" in str(caught.value)


def test_operations_on_lists_are_the_functions_of_torch_themselves() -> None:
    assert private.foreach_copy_ is torch._foreach_copy_
    assert private.foreach_mul_ is torch._foreach_mul_


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_optimizer_leaves_out_a_step_that_the_device_finds_bad(kind: Any) -> None:
    ends = []
    for is_bad in (False, True):
        param = torch.nn.Parameter(torch.ones(4))
        optimizer = kind([param], lr=0.1, fused=True)
        assert private.can_skip(optimizer)
        param.grad = torch.full((4,), float("nan") if is_bad else 1.0)
        private.step_unless(optimizer, torch.tensor(is_bad))
        assert not hasattr(optimizer, "found_inf")
        ends.append(param.detach())
    assert (ends[0] < 1).all()
    assert torch.equal(ends[1], torch.ones(4))
    assert not private.can_skip(kind([torch.nn.Parameter(torch.ones(1))], lr=0.1, fused=False))


class Backend:
    """Notes what is done with it; `names` are what this class of NCCL calls its groups."""

    def __init__(self, calls: list[str], names: tuple[str, str], *, fails: bool = False) -> None:
        self.calls, self.fails = calls, fails
        for name in names:
            setattr(self, name, lambda name=name: calls.append(name))

    def abort(self) -> None:
        self.calls.append("abort")
        if self.fails:
            raise RuntimeError("it is gone already")


@pytest.mark.parametrize(
    "names", [("_group_start", "_group_end"), ("_start_coalescing", "_end_coalescing")]
)
def test_communicators_are_aborted_in_one_group_even_if_one_fails(names: tuple[str, str]) -> None:
    calls: list[str] = []
    abort_together([Backend(calls, names, fails=True), Backend(calls, names)])
    assert calls == [names[0], "abort", "abort", names[1]]


def test_nothing_happens_where_there_is_nothing_to_abort() -> None:
    abort_together([])


def test_the_range_of_torch_is_the_same_wherever_it_is_written() -> None:
    root = Path(__file__).parents[2]
    makefile, settings = (root / "Makefile").read_text(), (root / "pyproject.toml").read_text()
    assert f"TORCH_oldest := {private.OLDEST}\n" in makefile
    assert f"TORCH_newest := {private.NEWEST}\n" in makefile
    assert f'"torch>={private.OLDEST}"' in settings
