"""Weights load from any file into any wrapping of a model, as a whole or not at all."""

from __future__ import annotations

import functools
import io
import os
import pickle
import pickletools
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import lines_executed
from sentences import says
from torch import Tensor, nn

import paceline
from paceline import load_weights
from paceline.checkpoint import Checkpoints, CheckpointWarning
from paceline.checkpoint.directory import list_entries
from paceline.checkpoint.folders import read_state
from paceline.checkpoint.formats import write_tensors
from paceline.checkpoint.weights import clean_names
from paceline.ddp.wrapper import match_names
from paceline.errors import CheckpointError, UsageError, WeightsError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))


def build(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def compiled_inside(model: nn.Module) -> nn.Module:
    model.body = torch.compile(model.body)  # type: ignore[assignment]
    return model


WRAPPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda model: model,
    "torch's DataParallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled inside": compiled_inside,
    "compiled, in torch's DataParallel": lambda model: nn.DataParallel(torch.compile(model)),
    "ours": lambda model: paceline.DataParallel(model, device_ids=["cpu:0", "cpu:1"]),
    "ours around compiled": lambda model: paceline.DataParallel(
        torch.compile(model), device_ids=["cpu:0", "cpu:1"]
    ),
}
each_wrapping = pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())


def values(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def assert_same_values(first: nn.Module, second: nn.Module) -> None:
    for mine, theirs in zip(values(first), values(second), strict=True):
        assert torch.equal(mine, theirs)


def save_plain(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pth")
    return folder / "model.pth"


def save_old_format(model: nn.Module, folder: Path) -> Path:
    path = folder / "model.pt"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    return path


def save_in_a_training_dict(model: nn.Module, folder: Path) -> Path:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    training = {
        "epoch": 3,
        "rng": {"torch": torch.get_rng_state()},
        "optimizer": optimizer.state_dict(),
        "nested": {"state_dict": model.state_dict()},
    }
    torch.save(training, folder / "last.ckpt")
    return folder / "last.ckpt"


def save_safetensors(model: nn.Module, folder: Path) -> Path:
    write_tensors(folder / "model.safetensors", model.state_dict())
    return folder / "model.safetensors"


def save_checkpoint(model: nn.Module, folder: Path) -> Path:
    with Checkpoints(folder / "run" / "checkpoints") as checkpoints:
        state = {"model": model.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
        checkpoints.save(5, state, facts={})
    return folder / "run"


SAVERS = [save_plain, save_old_format, save_in_a_training_dict, save_safetensors, save_checkpoint]


@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
@each_wrapping
def test_a_file_written_under_torchs_data_parallel_loads_into_any_wrapping_and_back(
    wrap: Callable[[nn.Module], Any], save: Callable[[nn.Module, Path], Path], tmp_path: Path
) -> None:
    source, wrapped, back = build(1), wrap(build(2)), nn.DataParallel(build(3))
    load_weights(wrapped, save(nn.DataParallel(source), tmp_path))
    assert_same_values(wrapped, source)
    load_weights(back, save(wrapped, tmp_path))
    assert_same_values(back, source)


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    report = load_weights(build(), save_in_a_training_dict(nn.DataParallel(build(1)), tmp_path))
    assert report.where == "['nested']['state_dict']"
    assert report.renamed["module.body.0.weight"] == "body.0.weight"
    assert len(report.loaded) == len(report.renamed) == len(build().state_dict())
    assert report.missing == report.unexpected == []
    assert "10 names changed, such as module.count -> count" in str(report)


def test_of_a_folder_the_newest_good_checkpoint_is_taken(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for seed in (1, 2):
            checkpoints.save(seed, {"model": build(seed).state_dict()}, facts={})
    newest = list_entries(tmp_path)[0].path
    (newest / "state.safetensors").write_bytes(b"")
    model = build()
    with pytest.warns(CheckpointWarning, match=newest.name):
        load_weights(model, tmp_path)
    assert_same_values(model, build(1))
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        load_weights(model, newest)


def test_of_several_state_dicts_the_one_that_fits_is_taken(tmp_path: Path) -> None:
    torch.save(
        {"model": nn.Linear(2, 2).state_dict(), "teacher": build(1).state_dict()}, tmp_path / "a.pt"
    )
    model = build()
    assert load_weights(model, tmp_path / "a.pt").where == "['teacher']"
    assert_same_values(model, build(1))


def test_a_tied_name_that_the_file_lacks_is_not_missing(tmp_path: Path) -> None:
    state = build(1).state_dict()
    del state["head.weight"]
    write_tensors(tmp_path / "a.safetensors", state)
    model = build()
    assert load_weights(model, tmp_path / "a.safetensors").tied == ["head.weight"]
    assert_same_values(model, build(1))


def test_another_precision_is_converted_and_reported(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", nn.Linear(2, 2).half().state_dict())
    report = load_weights(nn.Linear(2, 2), tmp_path / "a.safetensors")
    assert report.cast == dict.fromkeys(["weight", "bias"], "float16 -> float32")


def test_a_batch_norm_from_before_it_counted_batches_loads(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(3).state_dict()
    del state["num_batches_tracked"]
    torch.save(dict(state), tmp_path / "a.pt")
    assert load_weights(nn.BatchNorm1d(3), tmp_path / "a.pt").missing == []


@pytest.mark.parametrize(
    ("saved", "model", "words"),
    [
        (
            nn.Linear(2, 3),
            nn.Linear(2, 4),
            ["2 of another shape", "'weight'", "(3, 2)", "file", "(4, 2)", "model"],
        ),
        (
            nn.Sequential(nn.Linear(2, 2)),
            nn.Linear(2, 2),
            ["2 missing, 2 unexpected", "model: '0.weight', '0.bias'"],
        ),
        (
            nn.Linear(2, 2),
            nn.ModuleDict({"net": nn.Linear(2, 2)}),
            ["Missing", "file: 'net.weight'", "strict=False"],
        ),
        (
            nn.ModuleDict({"encoder": nn.Linear(2, 3), "head": nn.Linear(3, 1)}),
            nn.ModuleDict({"encodr": nn.Linear(2, 3), "head": nn.Linear(3, 1)}),
            ["Missing", "file: 'encodr.weight'", "'encoder.weight'", "'encodr.weight'?"],
        ),
        (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), ["1 unexpected", "model: 'bias'"]),
    ],
    ids=["shape", "prefix in the file", "prefix in the model", "misspelt", "unexpected"],
)
def test_a_mismatch_is_explained_and_nothing_is_loaded(
    saved: nn.Module, model: nn.Module, words: list[str], tmp_path: Path
) -> None:
    torch.save(nn.DataParallel(saved).state_dict(), tmp_path / "a.pt")
    before = [value.clone() for value in values(model)]
    with pytest.raises(WeightsError) as caught:
        load_weights(model, tmp_path / "a.pt")
    said = str(caught.value).replace("module.", "")
    assert says(said, *words)
    assert len(said.splitlines()) == 3
    assert all(map(torch.equal, values(model), before))


def test_without_strict_what_fits_is_loaded_and_the_rest_is_told(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 2), "extra": torch.ones(1)}, tmp_path / "a.pt")
    model = nn.Linear(2, 2)
    report = load_weights(model, tmp_path / "a.pt", strict=False)
    assert (report.missing, report.unexpected) == (["bias"], ["extra"])
    assert model.weight.eq(1).all()
    torch.save({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match="1 of another shape"):
        load_weights(model, tmp_path / "a.pt", strict=False)
    assert model.weight.eq(1).all()


class Stubborn(nn.Linear):
    """Raises when everything before it has been loaded."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        raise ValueError("not today")


@pytest.mark.parametrize("lacks_one", [False, True])
def test_a_module_that_fails_while_loading_leaves_the_model_as_it_was(
    lacks_one: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Stubborn(2, 2))
    before = [value.clone() for value in values(model)]
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    if lacks_one:
        del state["0.bias"]
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match="1 missing" if lacks_one else "not today"):
        load_weights(model, tmp_path / "a.pt")
    assert all(map(torch.equal, values(model), before))


class Renamed(nn.Linear):
    """Takes names of an older version of itself."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, *args)


def test_a_module_that_renames_while_loading_may(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 2), "bias": torch.zeros(2)}, tmp_path / "a.pt")
    model = Renamed(2, 2)
    assert load_weights(model, tmp_path / "a.pt").missing == []
    assert model.weight.eq(1).all()
    torch.save({"w": torch.zeros(2, 2)}, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match="missing"):
        load_weights(model, tmp_path / "a.pt")
    assert model.weight.eq(1).all()


class Canary:
    """Leaves a file behind if anybody runs what is in its pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def zipped(
    instructions: bytes,
    compression: int = zipfile.ZIP_STORED,
    name_of_instructions: str = "archive/data.pkl",
    **more: bytes,
) -> bytes:
    """A file as torch.save makes them, with these instructions in it."""
    original, changed = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.zeros(4)}, original)
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(changed, "w", compression) as new:
        for name in old.namelist():
            if not name.endswith("/data.pkl"):
                new.writestr(name, old.read(name))
        new.writestr(name_of_instructions, instructions)
        for name, data in more.items():
            new.writestr(f"archive/{name}.pkl", data)
    return changed.getvalue()


def with_data(data: bytes) -> bytes:
    """A file with a tensor of 16 bytes, and these for it."""
    original, changed = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.zeros(4)}, original)
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("/data/0") else old.read(name))
    return changed.getvalue()


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def repeated(codec: bytes) -> bytes:
    """Instructions that encode four letters 40 times over, doubling them each time."""
    encode = b"c_codecs\nencode\n"
    first = encode + b"X\4\0\0\0aaaaX\6\0\0\0latin1\x86R"
    again = b"X" + len(codec).to_bytes(4, "little") + codec + b"\x86R"
    return b"\x80\2" + encode * 40 + first + again * 40 + b"."


def after_the_streams(instructions: bytes) -> bytes:
    """A file of the old format with other instructions in its last stream."""
    file = io.BytesIO(saved({"w": torch.zeros(4)}, _use_new_zipfile_serialization=False))
    for _ in range(4):
        list(pickletools.genops(file))
    return file.getvalue()[: file.tell()] + instructions


def in_itself() -> dict[str, Any]:
    inside: dict[str, Any] = {}
    inside["inside"] = inside
    return inside


def doubled(times: int) -> list[Any]:
    twice: list[Any] = [0]
    for _ in range(times):
        twice = [twice, twice]
    return twice


def directory_of_names() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for i in range(60_000):
            archive.writestr(f"archive/{i:0250}", "")
    return file.getvalue()


def with_header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


TERABYTE = b"\x80\2cbuiltins\nbytearray\n\x8a\6\0\0\0\0\0\x10\x85R."
LONG = b"\x80\4\x8d" + (2**60).to_bytes(8, "little") + b"abc."
BASE = torch.zeros(2**18)
BOMBS: dict[str, Callable[[], bytes]] = {
    "a terabyte of bytearray": lambda: zipped(TERABYTE),
    "instructions in capitals": lambda: zipped(TERABYTE, name_of_instructions="archive/DATA.Pkl"),
    "instructions twice": lambda: zipped(b"\x80\2}.", Data=TERABYTE),
    "a terabyte in the last stream": lambda: after_the_streams(TERABYTE),
    "a text of 2^60 bytes": lambda: zipped(LONG),
    "a text of 2^60 bytes, old format": lambda: LONG,
    "a text of 8 GB, old format": lambda: LONG.replace(LONG[3:11], (2**33).to_bytes(8, "little")),
    "bytes of 2^60 bytes, old format": lambda: LONG.replace(b"\x8d", b"\x8e"),
    "hexadecimal again and again": lambda: zipped(repeated(b"H-e\xc3\xa9X_codec")),
    "base64 again and again": lambda: zipped(repeated(b"base!64")),
    "a tensor of stride 0": lambda: saved({"w": torch.zeros(1).expand(2**40)}),
    "a tensor that overlaps itself": lambda: saved({"w": BASE.as_strided((2**9, 2**17), (1, 1))}),
    "a tensor with the bytes of its neighbour": lambda: with_data(b"\0" * 15),
    "a tensor with bytes to spare": lambda: with_data(b"\0" * 20),
    "tensors that share their bytes": lambda: saved({str(i): BASE[i:] for i in range(50)}),
    "a dictionary inside itself": lambda: saved(in_itself()),
    "a list in a list": lambda: saved(doubled(40)),
    "a directory of names": directory_of_names,
    "a header of lists": lambda: with_header(b'{"a":[' + b"[]," * 2**22),
    "a header of digits": lambda: with_header(b'{"a":' + b"9" * (2**20 - 5)),
    "a header of another size": lambda: (2**50).to_bytes(8, "little") + b"{}",
}
"""Files that are small, and would take any amount of memory or time."""


def hostile_files(canary: Path) -> dict[str, bytes]:
    new, old = io.BytesIO(), io.BytesIO()
    torch.save({"model": Canary(canary), "w": torch.zeros(2)}, new)
    torch.save({"model": Canary(canary)}, old, _use_new_zipfile_serialization=False)
    whole_model = io.BytesIO()
    torch.save(nn.Linear(2, 2), whole_model)
    return {
        "zip": new.getvalue(),
        "old format": old.getvalue(),
        "bare pickle": pickle.dumps(Canary(canary), 2),
        "newest pickle": pickle.dumps(Canary(canary)),
        "pickle in a zip": zipped(pickle.dumps(Canary(canary), 2)),
        "a whole model": whole_model.getvalue(),
        "compressed": zipped(b"\x80\x02}.", zipfile.ZIP_DEFLATED),
        "truncated": new.getvalue()[:-100],
        "damaged instructions": zipped(b"\x80\x02garbage"),
        "nothing": b"",
        "text": b"GIF89a or something else altogether",
    }


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_is_a_typed_error_with_flat_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(BOMBS[kind]())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        read_state(path)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 50


def test_bytes_and_tied_weights_in_a_file_are_no_bomb(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    state = {str(i): weight for i in range(50)} | {"note": b"\xff" * 9, "hexagon": "hex_encoder"}
    torch.save(state, tmp_path / "a.pt")
    assert read_state(tmp_path / "a.pt")["note"] == b"\xff" * 9


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", hostile_files(Path("unused")))
def test_a_hostile_file_runs_nothing_and_is_a_typed_error(kind: str, tmp_path: Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "model.pth"
    path.write_bytes(hostile_files(canary)[kind])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"model\.pth"):
        load_weights(nn.Linear(2, 2), path)
    assert not canary.exists()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 50


def test_a_file_that_asks_to_run_something_is_told_by_its_name(tmp_path: Path) -> None:
    torch.save({"model": Canary(tmp_path / "canary")}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=r"asks for (posix\.)?mkdir\.\nNothing was run\."):
        load_weights(nn.Linear(2, 2), tmp_path / "model.pth")


def test_a_file_without_weights_and_an_object_that_is_no_model_are_mistakes(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "history": [1, 2]}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="has no weights"):
        load_weights(nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(UsageError, match="needs a module, not a dict"):
        load_weights({}, tmp_path / "a.pt")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs a path, not a dict"):
        load_weights(nn.Linear(2, 2), {"weight": torch.ones(2, 2)})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        load_weights(nn.Linear(2, 2), tmp_path)


BARE = ["embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "head.bias"]


@pytest.mark.parametrize(
    "wrapped",
    [
        BARE,
        [f"module.{name}" for name in BARE],
        [f"_orig_mod.{name}" for name in BARE],
        [f"module._orig_mod.{name}" for name in BARE],
        [f"_orig_mod.module.{name}" for name in BARE],
        [f"module.module._orig_mod.{name}" for name in BARE],
        [name.replace("layers.0.", "layers.0._orig_mod.") for name in BARE],
        [name.replace("layers.0.", "layers.0.module.") for name in BARE],
        [name.replace("layers.", "layers.module.") for name in BARE],
        [f"module.{name.replace('embed.', 'embed.module._orig_mod.')}" for name in BARE],
    ],
    ids=lambda names: names[0] + " " + names[1],
)
def test_prefixes_go_in_any_nesting_and_in_the_middle(wrapped: list[str]) -> None:
    assert list(clean_names(wrapped).values()) == BARE
    assert match_names(wrapped, BARE) == dict(zip(wrapped, BARE, strict=True))
    assert match_names(BARE, wrapped) == dict(zip(BARE, wrapped, strict=True))


@pytest.mark.parametrize(
    "names",
    [
        ["module.weight", "weight"],  # a part called module, beside other parts
        ["a.module.weight", "a.other.weight"],
        ["module"],  # a parameter called module
        ["a.module", "a._orig_mod"],
        ["submodule.weight", "modules.weight"],
    ],
    ids=str,
)
def test_a_part_of_the_model_that_is_called_module_stays(names: list[str]) -> None:
    assert list(clean_names(names).values()) == names


def test_what_cannot_be_told_from_a_wrapper_can_be_kept() -> None:
    names = ["module.encoder.module.weight", "module.head.weight"]
    assert clean_names(names)[names[0]] == "encoder.weight"
    assert clean_names(names, ["module.encoder.module"])[names[0]] == "encoder.module.weight"


def test_names_that_would_become_one_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'_orig_mod\.a' and 'a' would both be named 'a'"):
        clean_names(["_orig_mod.a", "a"])


def test_a_model_with_a_part_called_module_gets_its_own_weights() -> None:
    own = ["module.weight", "weight"]
    saved = [f"module.{name}" for name in own]
    assert match_names(saved, own) == dict(zip(saved, own, strict=True))
    assert match_names(own, saved) == dict(zip(own, saved, strict=True))
    assert match_names(own, own) == dict(zip(own, own, strict=True))


def test_names_that_could_mean_two_things_are_not_guessed() -> None:
    assert match_names(["module.w", "module.module.w", "b"], ["w"]) == {}
    assert match_names(["module.module.w"], ["module.w", "head.w"]) == {
        "module.module.w": "module.w"
    }


def test_only_what_fits_is_matched() -> None:
    found = match_names(["module.a", "module.b", "module.extra"], ["a", "b", "lacking"])
    assert found == {"module.a": "a", "module.b": "b"}
    assert match_names([], ["a"]) == match_names(["a"], []) == {}


def test_comparing_names_takes_work_in_proportion_to_their_number() -> None:
    lines = []
    for count in (1_000, 4_000):
        names = [f"layers.{i}.weight" for i in range(count)]
        lines.append(lines_executed(functools.partial(match_names, names, names)))
        assert len(match_names(names, names)) == count
    assert lines[1] < 4.5 * lines[0]


def test_a_mismatch_takes_work_in_proportion_to_the_number_of_names(tmp_path: Path) -> None:
    lines = []
    for count in (500, 2_000):
        torch.save({f"old.{i}": torch.zeros(1) for i in range(count)}, tmp_path / "a.pt")
        model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(count)])

        def load(model: nn.Module = model, count: int = count) -> None:
            with pytest.raises(WeightsError, match=f"{count:,} missing, {count:,} unexpected"):
                load_weights(model, tmp_path / "a.pt")

        lines.append(lines_executed(load))
    assert lines[1] < 4.5 * lines[0]
