"""Reads a saved context of any class."""

from pathlib import Path

from ..errors import StoreError
from ..results.record import classes_of, kind_of_file
from ..system.arguments import checked
from ..system.digest_file import read_with_digest
from . import hard_prompt, soft_prompt  # noqa: F401 - so that their classes are known
from .compressed import CompressedContext
from .prefix import PrefixContext


@checked
def load_context(path: str | Path) -> CompressedContext | PrefixContext:
    """Read a context that ``save`` wrote; a class of your own is known once it is defined.

    Raises:
        StoreError: The file cannot be read, is damaged, or holds no context of a known class.

    Examples:
        >>> path = al.compress(model, batch).save(folder / "context.safetensors")
        >>> type(al.contexts.load_context(path)).__name__
        'CompressedContext'
    """
    header, _ = read_with_digest(path)
    name = kind_of_file(header)
    if "context" not in header:
        raise StoreError(
            f"{path} holds a {name}, not a context; expected a file that save of a context wrote "
            "(use al.load_record for a record, al.contexts.context_from_peft for a peft adapter)"
        )
    # A notebook cell that runs again defines its class again: the last definition counts.
    ours: tuple[type[CompressedContext | PrefixContext], ...] = (CompressedContext, PrefixContext)
    kinds = {kind.__name__: kind for root in ours for kind in classes_of(root)}
    if name not in kinds:
        raise StoreError(
            f"{path} holds a {name}, a class that is not known here; import the module that "
            f"defines it, or use {name}.load(path)"
        )
    return kinds[name].load(path)
