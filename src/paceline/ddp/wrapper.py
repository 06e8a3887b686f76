"""A wrapper that does not show: names, attributes and checkpoints are the bare model's.

Both engines wrap the user's module. Seen from outside, `state_dict()` and `named_parameters()`
have no `module.` in their keys, attributes and methods of the module can be used directly, and
`load_state_dict()` takes files written under any wrapper.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from paceline.torch_private import NormBase

WRAPPERS = ("module", "_orig_mod")
"""What `nn.DataParallel`, torch's DistributedDataParallel and `torch.compile` put into names."""


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
        """Tell torch.distributed.checkpoint that `module` is not part of a name."""
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


class TorchNames(nn.Module):
    """Before a wrapper among the bases: names begin with `module.`, as those of torch's do."""

    state_dict = nn.Module.state_dict
    named_parameters = nn.Module.named_parameters
    named_buffers = nn.Module.named_buffers
    named_modules = nn.Module.named_modules

    def _fqn_modifiers(self) -> dict[str, str]:
        return {}


def bare(module: nn.Module) -> nn.Module:
    """The user's own module, inside any wrappers of ours and of `torch.compile`."""
    while True:
        children = module._modules  # a mapping without `get` in scripted modules
        inner = "module" if isinstance(module, Wrapper) else "_orig_mod"
        if inner not in children:
            return module
        module = children[inner]  # type: ignore[assignment]


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters to keep equal, each once, under the bare model's names."""
    inner = bare(module)
    ignored = _ignored_names(module, inner)
    return [(n, p) for n, p in inner.named_parameters() if n not in ignored]


def named_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers to keep equal, as they are now: modules may assign new tensors to them.

    Statistics of normalisation layers come without their version counter: in training mode their
    backward does not read them, but would refuse to run after a second forward pass copied them.
    """
    inner = bare(module)
    ignored = _ignored_names(module, inner)
    norms = [layer for layer in module.modules() if isinstance(layer, NormBase)]
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
    return [
        (name, buffer.data if id(buffer) in statistics else buffer)
        for name, buffer in inner.named_buffers()
        if name not in ignored
    ]


def _ignored_names(*modules: nn.Module) -> set[str]:
    """Names that torch's class would leave alone, by the attribute it looks for."""
    found = [getattr(each, "_ddp_params_and_buffers_to_ignore", ()) for each in modules]
    return set(chain.from_iterable(found))


def sparse_names(module: nn.Module) -> frozenset[str]:
    """Parameters whose layers were built to give sparse gradients."""
    return frozenset(
        f"{prefix}.weight" if prefix else "weight"
        for prefix, layer in bare(module).named_modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
    )


def without_prefixes(state_dict: Mapping[str, Any], module: nn.Module) -> Any:
    """The state dict with the names `module` uses: prefixes go where they are not part of it."""
    own = module.state_dict()
    # Names the module does not know, such as those a hook of it renames, follow the others.
    wrappers = find_wrappers(state_dict, keep=find_wrappers(own))
    names = {name: without_wrappers(name, wrappers) for name in state_dict}
    return rename(own, state_dict, names | match_names(state_dict, own))


def _path_to_bare(wrapper: Wrapper) -> str:
    """The attribute path from the wrapper to the user's module, as a key prefix."""
    path, module, target = "", wrapper, bare(wrapper)
    while module is not target:
        name = "module." if isinstance(module, Wrapper) else "_orig_mod."
        path += name
        module = module._modules[name[:-1]]  # type: ignore[assignment]
    return path


def rename(own: Any, given: Any, names: Mapping[str, str]) -> Any:
    """The file's tensors under the model's names, with the versions of modules that came along."""
    state: Any = type(own)((names.get(old, old), value) for old, value in given.items())
    versions, targets = getattr(given, "_metadata", None), getattr(own, "_metadata", None)
    if isinstance(versions, Mapping) and targets is not None:
        version_by_bare_name = {bare_name(name): each for name, each in versions.items()}
        state._metadata = type(targets)(
            (name, version_by_bare_name.get(bare_name(name), {})) for name in targets
        )
    return state


def bare_name(name: str) -> str:
    """The name without any part that could be a wrapper's."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def match_names(given: Collection[str], expected: Collection[str]) -> dict[str, str]:
    """Which of the expected names each given one means, whatever either was wrapped in.

    Tries the fewest changes first, and takes the first that explains most names. So a model with
    a part that is really called `module` keeps it.
    """
    best: dict[str, str] = {}
    spellings = [*_spellings(expected)]
    for mine in _spellings(given):
        for theirs in spellings:
            match = {mine[name]: theirs[name] for name in mine if name in theirs}
            best = max(best, match, key=len)
            if len(best) == min(len(given), len(expected)):
                return best
    return best


def _spellings(names: Collection[str]) -> Iterator[dict[str, str]]:
    """The names by themselves, by what they are without wrappers, and by their bare names.

    A spelling of two names is left out: what could mean two things is not guessed.
    """
    wrappers = find_wrappers(names)
    cleaned = {name: without_wrappers(name, wrappers) for name in names}
    for spelling in ({name: name for name in names}, cleaned, {n: bare_name(n) for n in names}):
        count = Counter(spelling.values())
        yield {new: name for name, new in spelling.items() if count[new] == 1}


def find_wrappers(names: Iterable[str], keep: Collection[str] = ()) -> frozenset[str]:
    """Where wrappers stand in the names, as paths that end in `module` or `_orig_mod`.

    `_orig_mod` is always a wrapper. `module` is one where nothing else stands beside it, because a
    wrapper has no parameters of its own; a model's own part of that name can be named in `keep`.
    """
    children: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    leaves = set(names)
    if not any(wrapper in name for name in leaves for wrapper in WRAPPERS):
        return frozenset()
    for name in leaves:
        parts = tuple(name.split("."))
        for depth, part in enumerate(parts):
            children[parts[:depth]].add(part)
    return frozenset(
        path
        for parent, parts in children.items()
        for part in parts & set(WRAPPERS)
        if part == "_orig_mod" or len(parts) == 1
        if (path := ".".join((*parent, part))) not in leaves and path not in keep
    )


def without_wrappers(name: str, wrappers: Collection[str]) -> str:
    """A name, or the path of a module, without the parts that `find_wrappers` found."""
    if not wrappers:
        return name
    parts = name.split(".")
    return ".".join(p for i, p in enumerate(parts) if ".".join(parts[: i + 1]) not in wrappers)
