"""Old public names raise an error that gives the new name."""

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
def test_the_error_for_an_old_name_gives_the_new_name(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=rf"anchorlens\.{old} is now anchorlens\.{new}$"):
        getattr(al, old)
    value: Any = al
    for part in new.split("."):
        value = getattr(value, part)


def test_an_unknown_name_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'anchorlens' has no attribute 'nothing'"):
        al.nothing  # noqa: B018


def test_the_error_for_an_old_argument_gives_the_new_name() -> None:
    @renamed_arguments(checkpoint="gradient_checkpointing")
    def function(gradient_checkpointing: bool = False) -> bool:
        return gradient_checkpointing

    assert function(gradient_checkpointing=True)
    with pytest.raises(TypeError, match="'checkpoint' of function is now 'gradient_checkpointing'"):
        function(checkpoint=True)  # type: ignore[call-arg]
