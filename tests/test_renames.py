"""Old public names raise an error that says the new name."""

from typing import Any

import pytest

import anchorlens as al
from anchorlens.system.renames import renamed_arguments


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Where", "Site"),
        ("first_and_last", "sites.first_and_last"),
        ("anchors_and_format", "selection.anchors_and_format"),
        ("as_in_prompt", "placement.as_in_prompt"),
    ],
)
def test_an_old_name_of_the_package_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=rf"anchorlens\.{old} is now anchorlens\.{new}$"):
        getattr(al, old)
    found: Any = al
    for part in new.split("."):
        found = getattr(found, part)


def test_a_name_that_never_was_is_an_ordinary_error() -> None:
    with pytest.raises(AttributeError, match="module 'anchorlens' has no attribute 'nothing'"):
        al.nothing  # noqa: B018


def test_an_old_argument_names_the_new_one() -> None:
    @renamed_arguments(checkpoint="gradient_checkpointing")
    def function(gradient_checkpointing: bool = False) -> bool:
        return gradient_checkpointing

    assert function(gradient_checkpointing=True)
    with pytest.raises(TypeError, match="'checkpoint' of function is now 'gradient_checkpointing'"):
        function(checkpoint=True)  # type: ignore[call-arg]
