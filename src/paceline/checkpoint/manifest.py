"""The manifest of a checkpoint: what it is, and the size and hash of each of its files.

It is written last, so a checkpoint without one was never finished. Starts without torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import CheckpointError, UsageError

FILE_NAME = "manifest.json"
TENSORS = "state.safetensors"
SKELETON = "state.json"
MAX_MANIFEST_BYTES = 4 * 2**20
MAX_SKELETON_BYTES = 64 * 2**20
MAX_DEPTH = 64
"""How deep a skeleton, and so a state, may be nested."""
FORMAT = "paceline checkpoint"
VERSION = 1

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class FileFacts:
    """How a file must look."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    created: float
    """Seconds since 1970."""
    metric: float | None
    facts: dict[str, Any]
    files: dict[str, FileFacts]

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as strict JSON can say them: nan and inf become words, everything else must fit."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(_finite(facts), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"The facts of a checkpoint are not JSON: {error}.",
            advice="Put tensors and other values into the state.",
        ) from None
    if len(json.dumps(plain)) > MAX_MANIFEST_BYTES // 2:
        raise UsageError(
            f"The facts of a checkpoint take more than {MAX_MANIFEST_BYTES // 2:,} bytes.",
            advice="Put long values into the state.",
        )
    return plain


def write_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON, with a hash of itself, so that no bit of it can change unnoticed."""
    said = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "created": manifest.created,
        "metric": _finite(manifest.metric),
        "facts": manifest.facts,
        "files": {
            name: {"bytes": file.bytes, "sha256": file.sha256}
            for name, file in manifest.files.items()
        },
    }
    return json.dumps({"manifest": said, "sha256": _hash(said)}, indent=1).encode() + b"\n"


def read_manifest(data: bytes, path: object) -> Manifest:
    """A checked manifest; names that lead out of the folder are refused here."""
    try:
        whole = json.loads(data)
        said = whole["manifest"]
        has_changed = whole["sha256"] != _hash(said)
    except (ValueError, RecursionError, KeyError, TypeError):
        raise CheckpointError(f"{path} is not a manifest we write, or it is damaged.") from None
    if has_changed:
        raise CheckpointError(f"{path} is damaged: it does not have the hash it states.")
    match said:
        case {"format": str(kind), "version": int(version)} if (kind, version) != (FORMAT, VERSION):
            raise CheckpointError(
                f"{path} is version {version} of {kind[:40]!r}; this paceline reads version "
                f"{VERSION} of {FORMAT!r}.",
                advice="Read it with the version that wrote it.",
            )
        case {
            "format": str(),
            "version": int(),
            "step": int(step),
            "created": int() | float() as created,
            "metric": metric,
            "facts": dict(facts),
            "files": dict(files),
        } if _is_metric(metric):
            found = {name: _file(name, file, path) for name, file in files.items()}
            if not {TENSORS, SKELETON} <= found.keys():
                raise CheckpointError(f"{path} does not list {TENSORS} and {SKELETON}.")
            metric = _NOT_FINITE.get(metric, metric)
            return Manifest(step, float(created), metric, facts, found)
    raise CheckpointError(f"{path} lacks a part that every manifest has.")


def _file(name: str, entry: Any, path: object) -> FileFacts:
    if not _NAME.fullmatch(name):
        raise CheckpointError(
            f"{path} lists the file {name[:80]!r}, which is no name of a file in this folder.",
            advice="Nothing of this checkpoint was used: somebody may have made it to do harm.",
        )
    match entry:
        case {"bytes": int(size), "sha256": str(digest)} if 0 <= size < 2**63:
            return FileFacts(size, digest)
    raise CheckpointError(f"{path} says nothing usable about {name!r}.")


def _is_metric(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or is_number or (isinstance(value, str) and value in _NOT_FINITE)


def _hash(said: Any) -> str:
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
