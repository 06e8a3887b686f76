"""Wrappers leave their names in weights; here they go, and nothing else does."""

from __future__ import annotations

import pytest

from paceline.checkpoint.weights import clean_names, describe_renames, match_names
from paceline.errors import CheckpointError

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


def test_changes_are_told_by_kind() -> None:
    renamed = {"module.a": "a", "module.b": "b", "c": "_orig_mod.c", "d": "d"}
    assert describe_renames(renamed) == [
        "'module.' removed in 2 names, such as module.a -> a",
        "'_orig_mod.' added in 1 name, such as c -> _orig_mod.c",
    ]
