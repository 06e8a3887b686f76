"""A wrapper that does not show: names, attributes, saving and loading."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.ddp.wrapper import Wrapper, bare, without_prefixes


class Passing(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.temperature = 1.0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) / self.temperature * self.scale
        return out

    def twice(self, x: Tensor) -> Tensor:
        return self.forward(x) * 2


def wrappings() -> list[tuple[str, Any]]:
    return [
        ("bare", lambda net: net),
        ("ours", Passing),
        ("ours twice", lambda net: Passing(Passing(net))),
        ("compiled", torch.compile),
        ("ours around compiled", lambda net: Passing(torch.compile(net))),
        ("DataParallel", nn.DataParallel),
    ]


def same_keys() -> list[str]:
    return list(Net().state_dict())


def test_names_are_the_bare_models() -> None:
    net = Net()
    wrapper = Passing(net)
    for method in ("named_parameters", "named_buffers", "named_modules"):
        assert [n for n, _ in getattr(wrapper, method)()] == [n for n, _ in getattr(net, method)()]
    assert list(wrapper.state_dict()) == list(net.state_dict())
    assert list(wrapper.state_dict(prefix="x.")) == [f"x.{key}" for key in net.state_dict()]


@pytest.mark.parametrize(("_name", "source"), wrappings(), ids=[n for n, _ in wrappings()])
@pytest.mark.parametrize("target", [Passing, lambda n: Passing(torch.compile(n))])
def test_a_state_dict_of_any_wrapper_loads(_name: str, source: Any, target: Any) -> None:
    trained = Net()
    with torch.no_grad():
        trained.layer.weight.fill_(7.0)
    loaded = target(Net())
    result = loaded.load_state_dict(source(trained).state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert loaded.state_dict()["layer.weight"][0, 0] == 7.0
    Net().load_state_dict(loaded.state_dict())


def test_a_child_that_is_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    wrapper = Passing(Holder())
    assert list(wrapper.state_dict()) == ["module.weight", "module.bias"]
    wrapper.load_state_dict(Holder().state_dict())
    wrapper.load_state_dict({f"module.{k}": v for k, v in Holder().state_dict().items()})


def test_mismatches_are_reported_under_bare_names() -> None:
    wrapper = Passing(Net())
    result = wrapper.load_state_dict(
        {"layer.weight": torch.zeros(2, 3), "ghost": torch.zeros(1)}, strict=False
    )
    assert sorted(result.missing_keys) == ["layer.bias", "scale"]
    assert result.unexpected_keys == ["ghost"]
    with pytest.raises(RuntimeError, match=r"layer\.bias"):
        wrapper.load_state_dict({})


def test_a_wrapper_inside_another_module_saves_and_loads_bare_names() -> None:
    class Trainer(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.head = nn.Linear(2, 1)

    bare_trainer, wrapped = Trainer(Net()), Trainer(Passing(Net()))
    assert list(wrapped.state_dict()) == list(bare_trainer.state_dict())
    assert [n for n, _ in wrapped.named_parameters()] == [
        n for n, _ in bare_trainer.named_parameters()
    ]
    wrapped.load_state_dict(bare_trainer.state_dict())
    bare_trainer.load_state_dict(wrapped.state_dict())
    torch.testing.assert_close(wrapped.state_dict(), bare_trainer.state_dict())
    twice = Trainer(Passing(torch.compile(Net())))
    twice.load_state_dict(bare_trainer.state_dict())
    torch.testing.assert_close(dict(twice.state_dict()), dict(bare_trainer.state_dict()))


def test_metadata_of_a_state_dict_survives() -> None:
    saved = nn.DataParallel(nn.BatchNorm1d(2)).state_dict()
    plain = without_prefixes(saved, nn.BatchNorm1d(2))
    assert isinstance(plain, OrderedDict)
    nn.BatchNorm1d(2).load_state_dict(plain)


def test_attributes_and_methods_pass_through_both_ways() -> None:
    wrapper = Passing(Net())
    assert wrapper.temperature == 1.0
    wrapper.temperature = 4.0
    assert wrapper.module.temperature == 4.0
    x = torch.ones(1, 3)
    torch.testing.assert_close(wrapper.twice(x), wrapper(x) * 2)
    assert wrapper.layer is wrapper.module.layer
    wrapper.note = "mine"
    assert not hasattr(wrapper.module, "note")
    assert "temperature" in dir(wrapper)
    with pytest.raises(AttributeError, match="nothing"):
        _ = wrapper.nothing


def test_train_eval_and_apply_reach_the_module() -> None:
    wrapper = Passing(Net())
    wrapper.eval()
    assert not wrapper.module.layer.training
    wrapper.train()
    assert wrapper.module.training
    wrapper.to(torch.float64)
    assert wrapper.module.layer.weight.dtype is torch.float64
    seen: list[str] = []
    wrapper.apply(lambda module: seen.append(type(module).__name__))
    assert "Linear" in seen
    wrapper.requires_grad_(False)
    assert not wrapper.module.layer.weight.requires_grad


def test_bare_finds_the_users_module() -> None:
    net = Net()
    assert bare(Passing(torch.compile(Passing(net)))) is net
