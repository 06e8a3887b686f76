"""Names of weights without what wrappers put into them.

`nn.DataParallel` and torch's DistributedDataParallel add `module.`, `torch.compile` adds
`_orig_mod.`: at the front, several deep, or in the middle where a part of a model was wrapped.
Pure text; starts without torch.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from paceline.errors import CheckpointError

WRAPPERS = ("module", "_orig_mod")
_DEEPEST = 4

Path = tuple[str, ...]


def find_wrappers(names: Iterable[str], keep: Collection[str] = ()) -> frozenset[Path]:
    """Where wrappers stand in the names, as paths that end in `module` or `_orig_mod`.

    `_orig_mod` is always a wrapper. `module` is one where nothing else stands beside it, because a
    wrapper has no parameters of its own; a model's own part of that name can be named in `keep`.
    """
    children: defaultdict[Path, set[str]] = defaultdict(set)
    leaves: set[Path] = set()
    for name in names:
        parts = tuple(name.split("."))
        leaves.add(parts)
        for depth, part in enumerate(parts):
            children[parts[:depth]].add(part)
    kept = {tuple(path.split(".")) for path in keep}
    return frozenset(
        (*parent, part)
        for parent, parts in children.items()
        for part in parts & set(WRAPPERS)
        if (*parent, part) not in leaves
        and (*parent, part) not in kept
        and (part == "_orig_mod" or len(parts) == 1)
    )


def without_wrappers(name: str, wrappers: Collection[Path]) -> str:
    """A name, or the path of a module, without the parts that `find_wrappers` found."""
    parts = tuple(name.split("."))
    kept = [part for i, part in enumerate(parts) if parts[: i + 1] not in wrappers]
    return ".".join(kept)


def clean_names(names: Collection[str], keep: Collection[str] = ()) -> dict[str, str]:
    """The bare name of each name; two that would become one are refused."""
    wrappers = find_wrappers(names, keep)
    cleaned = {name: without_wrappers(name, wrappers) for name in names}
    count = Counter(cleaned.values())
    twice = sorted(name for name, new in cleaned.items() if count[new] > 1)
    if twice:
        raise CheckpointError(
            f"{twice[0]!r} and {twice[1]!r} would both be named {cleaned[twice[0]]!r}.",
            advice="Name the part that belongs to the model with --keep.",
        )
    return cleaned


def match_names(given: Collection[str], expected: Collection[str]) -> dict[str, str]:
    """Which of the expected names each given one means, whatever either was wrapped in.

    Tries the fewest changes first, and takes the first that explains most names. So a model with
    a part that is really called `module` keeps it.
    """
    best: dict[str, str] = {}
    best_score = (0, 0)
    depths = [(i, j) for i in range(_DEEPEST + 1) for j in range(_DEEPEST + 1)]
    for mine, theirs in sorted(depths, key=sum):
        given_by_name = _strip_front(given, mine)
        expected_by_name = _strip_front(expected, theirs)
        if given_by_name is None or expected_by_name is None:
            continue
        found = _match(given_by_name, expected_by_name)
        equal = len(given_by_name.keys() & expected_by_name.keys())
        if (len(found), equal) > best_score:
            best, best_score = found, (len(found), equal)
        if equal == min(len(given), len(expected)):
            break
    return best


def bare_name(name: str) -> str:
    """The name without any part that could be a wrapper's."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _strip_front(names: Collection[str], count: int) -> dict[str, str] | None:
    """Each name by what it is without its first `count` parts, if these are always wrappers'."""
    stripped = {}
    for name in names:
        parts = name.split(".")
        if len(parts) <= count or not set(parts[:count]) <= set(WRAPPERS):
            return None
        stripped[".".join(parts[count:])] = name
    return stripped if len(stripped) == len(names) else None


def _match(given: Mapping[str, str], expected: Mapping[str, str]) -> dict[str, str]:
    """Equal names first; then those that are equal without wrappers and mean one thing only."""
    found = {given[name]: expected[name] for name in given if name in expected}
    left = [_by_bare_name(side, given.keys() & expected.keys()) for side in (given, expected)]
    for name, mine in left[0].items():
        theirs = left[1].get(name, [])
        if len(mine) == len(theirs) == 1:
            found[mine[0]] = theirs[0]
    return found


def _by_bare_name(names: Mapping[str, str], taken: Collection[str]) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, original in names.items():
        if name not in taken:
            found[bare_name(name)].append(original)
    return found


def describe_renames(renamed: Mapping[str, str]) -> list[str]:
    """What was changed, in a line for each kind of change."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for old, new in renamed.items():
        if old != new:
            kinds[_change(old, new)].append(f"{old} -> {new}")
    return [
        f"{change} in {len(names):,} {'name' if len(names) == 1 else 'names'}, such as {names[0]}"
        for change, names in kinds.items()
    ]


def _change(old: str, new: str) -> str:
    before, after = (Counter(p for p in n.split(".") if p in WRAPPERS) for n in (old, new))
    removed = ", ".join(f"'{part}.'" for part in (before - after).elements())
    added = ", ".join(f"'{part}.'" for part in (after - before).elements())
    words = [f"{removed} removed"] if removed else []
    return " and ".join([*words, f"{added} added"] if added else words) or "parts moved"


def foreign_prefix(given: Collection[str], expected: Collection[str]) -> Iterator[str]:
    """Sentences about a part that all names of one side begin with, and the other side lacks."""
    for ours, theirs, sentence in (
        (given, expected, "All names in the file begin with {!r}, and the model's do not."),
        (expected, given, "All names of the model begin with {!r}, and those in the file do not."),
    ):
        fronts = {name.split(".")[0] for name in ours}
        if len(fronts) != 1:
            continue
        front = f"{next(iter(fronts))}."
        bare = {name.removeprefix(front) for name in ours}
        if len(bare & set(theirs)) > len(set(ours) & set(theirs)):
            yield sentence.format(front)


def closest(name: str, among: Collection[str]) -> str | None:
    """The name that somebody may have meant."""
    return next(iter(difflib.get_close_matches(name, sorted(among), n=1, cutoff=0.6)), None)
