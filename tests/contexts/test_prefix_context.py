"""Contexts at the positions 0, 1, ... in files."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.contexts import StoredContext
from anchorlens.contexts.hard_prompts import of_tokens
from anchorlens.errors import StoreError
from anchorlens.system.digest_file import read_with_digest, to_bytes_with_digest
from tests.support.measures import same
from tests.support.trained_contexts import split, train_prefix, train_soft_prompt, trained


@dataclass(frozen=True, eq=False, kw_only=True)
class Named(al.contexts.PrefixContext):
    text: str
    embeddings: Tensor


class Renamed(Named):
    """A class two levels below ours."""


MADE: list[tuple[type[Any], Any]] = [
    (al.contexts.PrefixContext, train_prefix),
    (al.contexts.SoftPrompt, train_soft_prompt),
    (
        al.contexts.HardPrompt,
        lambda model, batches, held_out, **_: of_tokens(model, [300, 17], held_out=held_out),
    ),
    (al.contexts.CompressedContext, lambda model, batches, **_: al.compress(model, batches[0])),
]


@pytest.mark.quick_cases("trained contexts", "CompressedContext")
@pytest.mark.parametrize(("kind", "make"), MADE, ids=[kind.__name__ for kind, _ in MADE])
def test_a_loaded_context_is_the_saved_one(
    gpt2: Any, llama: Any, gemma3: Any, tmp_path: Path, kind: Any, make: Any
) -> None:
    path = tmp_path / "context.safetensors"
    for model in (gpt2, llama, gemma3):
        batches, held_out = split(model)
        context = make(model, batches, held_out=held_out, length=2, steps=2)
        for read in (kind.load, StoredContext.load):
            loaded = read(context.save(path))
            assert type(loaded) is kind and same(loaded, context)
            shown = [(each.info, each.size, repr(each)) for each in (loaded, context)]
            assert shown[0] == shown[1]
            batch = batches[0]
            assert torch.equal(loaded.logits(model, batch), context.logits(model, batch))
        for name in ("text", "query_position"):
            assert vars(loaded).get(name) == vars(context).get(name)


def test_a_class_of_ones_own_is_saved_with_its_fields(gpt2: Any, tmp_path: Path) -> None:
    base = trained(gpt2, steps=0)
    own = Named(**vars(base) | {"training": None}, text="a b", embeddings=torch.eye(2))
    path = own.save(tmp_path / "own.safetensors")
    loaded = StoredContext.load(path)
    assert isinstance(loaded, Named) and loaded.text == "a b" and loaded.training is None
    assert torch.equal(loaded.embeddings, torch.eye(2))
    assert "accuracy on held-out queries not known" in repr(loaded)
    renamed = Renamed(**vars(own)).save(tmp_path / "renamed.safetensors")
    assert type(StoredContext.load(renamed)) is Renamed
    assert type(al.contexts.PrefixContext.load(path)) is Named
    with pytest.raises(StoreError, match=r"a Named, not a SoftPrompt; use Named\.load"):
        al.contexts.SoftPrompt.load(path)
    texts: Any = ["a", "b"]
    wrong = replace(own, text=texts)
    with pytest.raises(StoreError, match=r"is not written: .*: text must be a tensor, record"):
        wrong.save(path)


def test_wrong_contents_are_refused(gpt2: Any, tmp_path: Path) -> None:
    path = trained(gpt2, steps=0).save(tmp_path / "context")
    header, tensors = read_with_digest(path)
    for missing in ({"training.losses"}, {name for name in tensors if "key." in name}):
        rest = {name: value for name, value in tensors.items() if name not in missing}
        path.write_bytes(to_bytes_with_digest(header, rest))
        with pytest.raises(StoreError, match="not hold what a PrefixContext of this version"):
            StoredContext.load(path)
