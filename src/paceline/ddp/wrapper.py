"""A wrapper that does not show: names, attributes and checkpoints are the bare model's.

Both engines wrap the user's module. Seen from outside, `state_dict()` and `named_parameters()`
have no `module.` in their keys, attributes and methods of the module can be used directly, and
`load_state_dict()` takes files written under any wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

PREFIXES = ("module.", "_orig_mod.")
"""What `nn.DataParallel`, torch's DistributedDataParallel and `torch.compile` put before names."""

T = TypeVar("T")


class Wrapper(nn.Module):
    """Holds `module` and passes for it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:  # still in __init__, or being unpickled
                raise
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the module's own attributes on the module, where its code reads them."""
        module = self.__dict__.get("_modules", {}).get("module")
        is_ours = name in self.__dict__ or name == "module" or hasattr(type(self), name)
        if module is None or is_ours or not hasattr(module, name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})  # type: ignore[no-untyped-call]

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch.distributed.checkpoint that `module` is no part of a name."""
        return {"": "module"}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return bare(self.module).state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of the bare model, or one written under any wrapper."""
        module = bare(self.module)
        return module.load_state_dict(
            without_prefixes(state_dict, module), strict=strict, assign=assign
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Called when a parent of this wrapper loads: give the children the names they look for."""
        inner = f"{prefix}{_path_to_bare(self)}"
        mine = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        plain = without_prefixes(
            {key[len(prefix) :]: value for key, value in mine.items()}, bare(self.module)
        )
        for key in mine:
            del state_dict[key]
        for key, value in plain.items():
            state_dict[f"{inner}{key}"] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return bare(self.module).named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return bare(self.module).named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return bare(self.module).named_modules(*args, **kwargs)


def bare(module: nn.Module) -> nn.Module:
    """The user's own module, inside any wrappers of ours and of `torch.compile`."""
    while True:
        children = module._modules  # a mapping without `get` in scripted modules
        inner = "module" if isinstance(module, Wrapper) else "_orig_mod"
        if inner not in children:
            return module
        module = children[inner]  # type: ignore[assignment]


def without_prefixes(state_dict: Mapping[str, T], module: nn.Module) -> dict[str, T]:
    """The state dict with the names `module` uses: prefixes go where they are no part of a name."""
    expected = set(module.state_dict().keys())
    renamed = {key: _without_prefix(key, expected) for key in state_dict}
    for prefix in PREFIXES:
        # Keys the module does not know, such as those a hook of it renames, follow the others.
        is_foreign = not any(key.startswith(prefix) for key in expected)
        if is_foreign and all(key.startswith(prefix) for key in state_dict):
            renamed = {key: new.removeprefix(prefix) for key, new in renamed.items()}
    plain = {renamed[key]: value for key, value in state_dict.items()}
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        plain = type(state_dict)(plain)  # type: ignore[assignment, call-arg]
        plain._metadata = metadata  # type: ignore[attr-defined]
    return plain


def _without_prefix(key: str, expected: set[str]) -> str:
    """Strip prefixes from the front as long as the key is not one the module expects."""
    stripped = key
    while stripped not in expected and stripped.startswith(PREFIXES):
        stripped = stripped.split(".", 1)[1]
    return stripped if stripped in expected or not expected else key


def _path_to_bare(wrapper: Wrapper) -> str:
    """The attribute path from the wrapper to the user's module, as a key prefix."""
    path, module, target = "", wrapper, bare(wrapper)
    while module is not target:
        name = "module." if isinstance(module, Wrapper) else "_orig_mod."
        path += name
        module = module._modules[name[:-1]]  # type: ignore[assignment]
    return path
