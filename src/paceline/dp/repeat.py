"""Whether a pass would do the same again: what its code reads, and a guard on all of that.

`prove` takes a pass that was watched (see `watch`). Every function outside torch that ran must be
known by an object that can be looked at, be made of harmless instructions, and read nothing but
constants, tensors, modules and other such functions. The `Proof` remembers what was read;
`holds()` says whether all of it is still the same. See Note [What makes a pass repeatable].
"""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.dp.watch import Watch

MOST_SNAPSHOTS = 8
"""A module whose attributes change more often, such as a dropout rate with every step, is left."""

_INSTRUCTIONS = {
    *("BINARY_SLICE", "BINARY_SUBSCR", "BUILD_CONST_KEY_MAP", "BUILD_LIST"),
    *("BUILD_MAP", "BUILD_SET", "BUILD_SLICE", "BUILD_STRING", "BUILD_TUPLE", "CACHE", "CALL"),
    *("CALL_FUNCTION_EX", "CALL_KW", "COMPARE_OP", "CONTAINS_OP", "CONVERT_VALUE", "COPY"),
    *("COPY_FREE_VARS", "DELETE_FAST", "DICT_MERGE", "DICT_UPDATE", "END_FOR", "EXTENDED_ARG"),
    *("FORMAT_SIMPLE", "FORMAT_VALUE", "FORMAT_WITH_SPEC", "FOR_ITER", "GET_ITER", "GET_LEN"),
    *("IS_OP", "KW_NAMES", "LIST_APPEND", "LIST_EXTEND", "LIST_TO_TUPLE"),
    *("LOAD_ASSERTION_ERROR", "LOAD_ATTR", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_DEREF"),
    *("LOAD_FAST", "LOAD_FAST_AND_CLEAR", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"),
    *("LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD"),
    *("LOAD_SMALL_INT", "LOAD_SUPER_ATTR", "MAKE_CELL", "MAKE_FUNCTION", "MAP_ADD", "NOP"),
    *("NOT_TAKEN", "POP_ITER", "POP_TOP", "PRECALL", "PUSH_NULL", "RAISE_VARARGS", "RERAISE"),
    *("RESUME", "RETURN_CONST", "RETURN_VALUE", "SET_ADD", "SET_FUNCTION_ATTRIBUTE", "SET_UPDATE"),
    *("STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST", "SWAP", "TO_BOOL"),
    *("UNARY_INVERT", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_POSITIVE", "UNPACK_EX"),
    "UNPACK_SEQUENCE",
}
"""None of these stores outside of the function's own variables, imports, waits or catches."""

_ATTRIBUTE_READS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_INTRINSICS = {"INTRINSIC_LIST_TO_TUPLE", "INTRINSIC_UNARY_POSITIVE"}
_DUNDERS = {"__call__", "__class__", "__len__", "__name__"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSORS = ("_parameters", "_buffers")
_INSIDE_MODULES = {"_modules", *_TENSORS, *_HOOKS}
_FUNCTIONS = {
    *(abs, all, any, callable, divmod, isinstance, issubclass, iter, len, max, min, next),
    *(pow, round, sorted, sum),
}
_TYPES = {
    *(bool, dict, enumerate, float, frozenset, int, list, range, reversed, set, slice, str),
    *(super, tuple, type, zip, Tensor, nn.Parameter, torch.Size, torch.device, torch.dtype),
}
_CONSTANTS = {
    *(type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_NAMESPACES = (
    *(torch, torch.functional, torch.fft, torch.linalg, torch.special),
    *(nn, nn.functional, math),
)
_ABSENT = object()


class _NotProvenError(Exception):
    """Why a pass may do something else the next time; never leaves this file."""


class Attributes:
    """All attributes, parameters and buffers of some modules, as they were, by identity."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._states = [module.__dict__ for module in modules]
        self._modules = modules
        self._kinds = [type(module) for module in modules]
        self._names = [tuple(state) for state in self._states]
        self._values = [tuple(state.values()) for state in self._states]
        self._tensors = [state[name] for state in self._states for name in _TENSORS]
        self._tensors_seen = [tuple(tensors.values()) for tensors in self._tensors]
        self._hooks = [state[name] for state in self._states for name in _HOOKS]

    def are_same(self) -> bool:
        return (
            all(map(is_, map(type, self._modules), self._kinds))
            and all(map(_same, self._states, self._names))
            and all(map(_same_values, self._states, self._values))
            and all(map(_same_values, self._tensors, self._tensors_seen))
        )

    def have_hooks(self) -> bool:
        return any(self._hooks)


class Snapshots:
    """Gives every state of some modules' attributes a number, the same when it comes back.

    Modes are attributes too: `eval()` and `train()` go back and forth between two numbers.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._known: list[Attributes] = []
        self._current = 0

    def number(self) -> int | None:
        """None if there are too many, or if there is a hook, which a replay would leave out."""
        if not self._known or not self._known[self._current].are_same():
            self._current = next(
                (i for i, known in enumerate(self._known) if known.are_same()), len(self._known)
            )
            if self._current == MOST_SNAPSHOTS:
                self._current = 0
                return None
            if self._current == len(self._known):
                self._known.append(Attributes(self._modules))
        has_hooks = self._known[self._current].have_hooks()
        return None if has_hooks or _has_global_hooks() else self._current


class Proof:
    """What a pass that can be repeated relied on, besides the attributes of the model's modules."""

    def __init__(self) -> None:
        self._attributes = Attributes([])
        self._classes: list[tuple[type, tuple[Any, ...], tuple[Any, ...]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._functions: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self._tensors: list[tuple[Tensor, tuple[Any, ...]]] = []

    def holds(self) -> bool:
        """Whether all of it is what it was."""
        return (
            self._attributes.are_same()
            and not self._attributes.have_hooks()
            and all(
                _same(vars(kind), names) and _same_values(vars(kind), values)
                for kind, names, values in self._classes
            )
            and all(freeze(container) == seen for container, seen in self._containers)
            and all(names.get(name, _ABSENT) is seen for names, name, seen in self._names)
            and all(_same(_parts(function), parts) for function, parts in self._functions)
            and all(place_of(tensor) == seen for tensor, seen in self._tensors)
        )

    def rely_on_modules(self, modules: Sequence[nn.Module]) -> None:
        self._attributes = Attributes(modules)

    def rely_on_classes(self, kinds: Iterable[type]) -> None:
        self._classes = [(kind, tuple(vars(kind)), tuple(vars(kind).values())) for kind in kinds]

    def rely_on_name(self, names: Mapping[str, Any], name: str) -> Any:
        value = names.get(name, _ABSENT)
        self._names.append((names, name, value))
        return value

    def rely_on_function(self, function: FunctionType) -> None:
        self._functions.append((function, _parts(function)))

    def rely_on_tensor(self, tensor: Tensor) -> None:
        self._tensors.append((tensor, place_of(tensor)))

    def rely_on_container(self, container: Any) -> None:
        self._containers.append((container, freeze(container)))


def prove(watch: Watch, modules: Sequence[nn.Module], functions: Sequence[Any] = ()) -> Proof | str:
    """A proof for the pass, or the reason why there is none.

    `modules` are the model's, all of them; `functions` are called besides it: a loss function.
    """
    if watch.refusal is not None:
        return watch.refusal
    try:
        return _Prover(watch, modules).prove(functions)
    except _NotProvenError as reason:
        return str(reason)


class _Prover:
    """Follows the code that ran to everything it reads."""

    def __init__(self, watch: Watch, modules: Sequence[nn.Module]) -> None:
        self._watch = watch
        self._proof = Proof()
        self._model = list(modules)
        self._others: list[nn.Module] = []
        """Modules that functions refer to: a criterion."""
        self._left = dict(watch.codes)
        """The code that ran and was not looked at yet, by `id`."""
        self._found: dict[int, list[FunctionType]] = {}
        """The functions that code could be, by its `id`."""
        self._read: set[str] = set()
        """The names of all attributes that code reads."""
        self._seen: set[int] = set()
        self._adds_in_place = False
        self._reads_containers = False

    def prove(self, functions: Sequence[Any]) -> Proof:
        for function in functions:
            self._admit(function, "the loss function")
        while True:
            self._find_methods()
            self._admit_attributes()
            found = chain.from_iterable(self._found.get(key, ()) for key in self._watch.codes)
            pending = [function for function in found if id(function) not in self._seen]
            if not pending:
                break
            for function in pending:
                self._check_function(function)
        for code in self._left.values():
            raise _NotProvenError(f"where {code.co_qualname} comes from is unknown")
        for module in chain(self._model, self._others):
            self._check_module(module)
        if self._adds_in_place and self._reads_containers:
            raise _NotProvenError("it may add to a list in place")
        self._proof.rely_on_modules(self._others)
        self._proof.rely_on_classes({k for k in self._kinds() if k is not object})
        return self._proof

    def _kinds(self) -> Iterator[type]:
        for kind in {type(module) for module in chain(self._model, self._others)}:
            yield from kind.__mro__

    def _find_methods(self) -> None:
        for kind in set(self._kinds()):
            if kind is not object and not _is_torchs(kind):
                for value in vars(kind).values():
                    self._find(value)

    def _find(self, value: Any) -> None:
        if isinstance(value, property):
            for accessor in (value.fget, value.fset, value.fdel):
                self._find(accessor)
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            self._find(value.__func__)
        elif isinstance(value, FunctionType):
            known = self._found.setdefault(id(value.__code__), [])
            if not any(value is function for function in known):
                known.append(value)

    def _admit_attributes(self) -> None:
        """What code reads from modules and their classes, by name."""
        for module in chain(self._model, list(self._others)):
            for name in self._read & module.__dict__.keys():
                self._admit(module.__dict__[name], f"{name} of {type(module).__name__}")
            for tensor in chain(module._parameters.values(), module._buffers.values()):
                if tensor is not None and self._read & tensor.__dict__.keys():
                    raise _NotProvenError(f"a tensor of {type(module).__name__} has attributes")
        for kind in {*self._kinds(), Tensor} - {object}:
            for name in self._read & vars(kind).keys():
                value = self._proof.rely_on_name(vars(kind), name)
                if not isinstance(value, (property, staticmethod, classmethod)):
                    self._admit(value, f"{name} of {kind.__name__}")

    def _check_module(self, module: nn.Module) -> None:
        kind = type(module)
        if type(kind) is not type:
            raise _NotProvenError(f"{kind.__name__} has a class of its own kind")
        if "forward" in module.__dict__:
            raise _NotProvenError(f"a {kind.__name__} has a forward() of its own")
        if _is_torchs(kind):
            for name, value in module.__dict__.items():  # any of which torch's code may read
                if isinstance(value, (list, dict, set)) and value and name not in _INSIDE_MODULES:
                    self._admit(value, f"{name} of {kind.__name__}")

    def _check_function(self, function: FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self._proof.rely_on_function(function)
        where = function.__qualname__
        if function.__dict__.keys() - {"__wrapped__"}:
            raise _NotProvenError(f"{where} has attributes")
        for value in _defaults(function):
            self._admit(value, f"a default of {where}")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._admit(_contents(cell), f"{name} in {where}")
        for code in _with_nested(function.__code__):
            self._left.pop(id(code), None)
            self._check_code(code, function.__globals__)

    def _check_code(self, code: CodeType, names: dict[str, Any]) -> None:
        where = code.co_qualname
        attributes, read = set(), set()
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                read.add(step.argval)
            elif step.opname in _ATTRIBUTE_READS:
                attributes.add(step.argval)
            elif step.opname == "BINARY_OP":
                self._adds_in_place |= step.argrepr.endswith("=")
            elif step.opname == "STORE_DEREF":
                self._check(step.argval in code.co_cellvars, f"{where} does STORE_DEREF")
            elif step.opname == "CALL_INTRINSIC_1":
                self._check(step.argrepr in _INTRINSICS, f"{where} does {step.argrepr}")
            elif step.opname not in _INSTRUCTIONS and "JUMP" not in step.opname:
                raise _NotProvenError(f"{where} does more than compute ({step.opname})")
        for name in attributes:
            is_dunder = name.startswith("__") and name.endswith("__")
            if (is_dunder and name not in _DUNDERS) or name in _INSIDE_MODULES:
                raise _NotProvenError(f"{where} reads {name}")
        self._read |= attributes
        for name in read:
            value = self._proof.rely_on_name(names, name)
            if value is _ABSENT:
                value = self._proof.rely_on_name(vars(builtins), name)
            self._admit_named(value, f"{name} in {where}", attributes)

    @staticmethod
    def _check(claim: bool, otherwise: str) -> None:
        if not claim:
            raise _NotProvenError(otherwise)

    def _admit_named(
        self, value: Any, what: str, attributes: set[str], inside: tuple[Any, ...] = ()
    ) -> None:
        """Admit what a name stands for; of torch itself, what code can reach with `attributes`."""
        if not isinstance(value, ModuleType):
            self._admit(value, what)
            return
        if value not in _NAMESPACES:
            raise _NotProvenError(f"{what} is a module")
        for name in attributes & vars(value).keys():
            member = self._proof.rely_on_name(vars(value), name)
            if not any(member is each for each in (*inside, value)):
                self._admit_named(member, f"{name} of {what}", attributes, (*inside, value))

    def _admit(self, value: Any, what: str) -> None:
        """Raise unless it is something that code may read; remember what could change of it."""
        if type(value) in _CONSTANTS:
            return
        if isinstance(value, nn.Module):
            self._admit_module(value, what)
        elif isinstance(value, Tensor):
            if type(value) is not Tensor or value.requires_grad:
                raise _NotProvenError(f"{what} learns outside of the model")
            if value.device != self._watch.device:
                raise _NotProvenError(f"{what} is a tensor on {value.device}")
            self._proof.rely_on_tensor(value)
        elif type(value) in (list, dict, set, tuple, frozenset, torch.Size):
            if freeze(value) is None:
                raise _NotProvenError(f"{what} holds more than constants")
            if any(part is each for part in _containers(value) for each in self._watch.changed):
                raise _NotProvenError(f"{what} is changed")
            self._reads_containers |= type(value) in (list, dict, set)
            self._proof.rely_on_container(value)
        elif not self._is_known(value, what):
            raise _NotProvenError(f"{what} is a {type(value).__name__}")

    def _is_known(self, value: Any, what: str) -> bool:
        """Whether it is a function or a class whose use is looked at elsewhere."""
        if isinstance(value, type):
            is_error = issubclass(value, Exception) and value.__module__ == "builtins"
            return value in _TYPES or is_error or _is_torchs(value) or value in self._kinds()
        if isinstance(value, MethodType):
            if not isinstance(value.__self__, nn.Module):
                return False
            self._admit_module(value.__self__, what)
        if isinstance(value, (FunctionType, MethodType)):
            self._find(value)
            return True
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            return owner is None or isinstance(owner, (ModuleType, type)) or value in _FUNCTIONS
        return False

    def _admit_module(self, module: nn.Module, what: str) -> None:
        if any(module is known for known in chain(self._model, self._others)):
            return
        if any(tensor.requires_grad for tensor in (*module.parameters(), *module.buffers())):
            raise _NotProvenError(f"{what} learns outside of the model")
        if next(module.buffers(), None) is not None and module.training:
            raise _NotProvenError(f"{what} may write to its buffers")
        for each in module.modules():
            if any(each.__dict__[name] for name in _HOOKS):
                raise _NotProvenError(f"{what} has hooks")
            for tensor in chain(each._parameters.values(), each._buffers.values()):
                if tensor is not None:
                    self._proof.rely_on_tensor(tensor)
            for part in (each._parameters, each._buffers, each._modules):
                for name in part:
                    self._proof.rely_on_name(part, name)
            self._others.append(each)


def freeze(value: Any) -> Any:
    """The value of nested containers of constants, with types; None if there is more in them."""
    if type(value) in _CONSTANTS:
        return (type(value), repr(value))
    if type(value) in (list, tuple, torch.Size):
        parts = [freeze(item) for item in value]
    elif type(value) in (set, frozenset):
        # In the order of iteration, which code may depend on.
        parts = [freeze(item) for item in value]
    elif type(value) is dict:
        parts = [freeze(part) for item in value.items() for part in item]
    else:
        return None
    return None if None in parts else (type(value), *parts)


def _containers(value: Any) -> Iterator[Any]:
    if type(value) in (list, dict, set, tuple, frozenset):
        yield value
        for item in value.values() if type(value) is dict else value:
            yield from _containers(item)


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how it is laid out there."""
    return (
        *(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype),
        *(tensor.requires_grad, type(tensor)),
    )


def _has_global_hooks() -> bool:
    has_any: bool = nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    return has_any


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules.")


def _same(now: Iterable[Any], seen: tuple[Any, ...]) -> bool:
    now = tuple(now)
    return len(now) == len(seen) and all(map(is_, now, seen))


def _same_values(now: Any, seen: tuple[Any, ...]) -> bool:
    return _same(now.values(), seen)


def _parts(function: FunctionType) -> tuple[Any, ...]:
    """What a function is made of."""
    cells = (_contents(cell) for cell in function.__closure__ or ())
    return (function.__code__, function.__globals__, *cells, _ABSENT, *_defaults(function))


def _defaults(function: FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


# Note [What makes a pass repeatable]
#
# A replay starts the kernels of one pass again; no Python runs. That is the same computation if
# Python would start the same kernels, on the same memory. Python decides that from what it reads:
#
# - Its inputs: shapes, dtypes, strides and constants are part of a recording's signature.
# - Tensors. The watched pass took nothing from them but what the signature holds of them: no value
#   of any tensor reached Python, so no branch and no index depends on one.
# - Attributes of modules: compared by identity before every replay, all of them.
# - Globals, closures, defaults, classes: every one that the code that ran can name is a constant,
#   torch, or something that was looked at in the same way, and is compared before every replay.
# - Modes of torch, and its switches: part of the signature.
#
# Everything else that a function can read (the clock, a file, a random number of Python, a
# counter) is an object of some other kind, or a C function that is not on the list, and refuses the
# proof. So does everything that leaves a trace: storing attributes or items, writing to an input or
# a parameter, a warning. What is not understood runs as usual.
