"""The one form of a file of a record or a context: what json holds of it, and its tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..errors import StoreError
from ..system.arguments import checked
from ..system.digest_file import Sealed, read_with_digest, to_bytes_with_digest
from ..system.files import write_atomically
from ..system.package import homes_of

_S = TypeVar("_S", bound="Saved")
_OTHER_FORMS = (".csv", ".json", ".html", ".parquet", ".pt", ".xlsx")


class Saved:
    """A dataclass whose fields are tensors and what json holds, such as ``info``."""

    def _parts(self) -> Sealed:
        """What json holds, and the tensors by name; a ValueError for what does not fit."""
        raise NotImplementedError

    @classmethod
    def _of_parts(cls: type[_S], given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _S:
        """What has these parts; a ValueError for what does not fit."""
        raise NotImplementedError

    @checked
    def save(self, path: str | Path) -> Path:
        """Write all of it into one safetensors file, with ``info`` as json, and return its path.

        Files of equal contents are equal byte for byte, and hold a digest of them.

        Raises:
            StoreError: ``info`` is no json, a tensor does not fit its field, the path ends as other
                files do (.csv), or writing failed.

        Examples:
            >>> result = al.run(model, batches, [al.Accuracy()], progress=False)["accuracy"]
            >>> same = al.records.AccuracyRecord.load(result.save(folder / "result.safetensors"))
            >>> bool(same.accuracy == result.accuracy)
            True
        """
        name, path = type(self).__name__, Path(path)
        if path.suffix.lower() in _OTHER_FORMS:
            raise StoreError(
                f"{path} is not written: save writes a .safetensors file, which load reads; for a "
                "table use to_frame(), as in record.to_frame().to_csv(path)"
            )
        try:
            values, tensors = self._parts()
        except ValueError as why:
            raise StoreError(f"{path} is not written: this is no valid {name}: {why}") from why
        write_atomically(path, to_bytes_with_digest({"class": name, **values}, tensors))
        return path

    @classmethod
    @checked
    def load(cls: type[_S], path: str | Path) -> _S:
        """Read what ``save`` wrote of this class, or of one that inherits from it.

        So ``al.Record.load`` reads any record, and ``al.contexts.StoredContext.load`` any context.
        A class of your own is known once it is defined.

        Raises:
            StoreError: The file cannot be read, is damaged, or holds something else.

        Examples:
            >>> result = al.run(model, batches, [al.Accuracy()], progress=False)["accuracy"]
            >>> type(al.Record.load(result.save(folder / "result.safetensors"))).__name__
            'AccuracyRecord'
        """
        values, tensors = read_with_digest(path)
        name = values.pop("class", None)
        kind = cls if name == cls.__name__ else cls._class_of(path, name)
        try:
            return kind._of_parts(values, tensors)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            reason = error if isinstance(error, ValueError) else repr(error)
            raise StoreError(
                f"{path} does not hold what a {name} of this version holds: {reason}; make it "
                "again and save that"
            ) from error

    @classmethod
    def _class_of(cls: type[_S], path: str | Path, name: object) -> type[_S]:
        """The class of this name that inherits from this one; an error if there is none."""
        if not isinstance(name, str):
            raise StoreError(
                f"{path} holds no record and no context; expected a file that their save wrote "
                "(al.contexts.context_from_peft reads an adapter of peft)"
            )
        if home := homes_of(__name__.partition(".")[0]).get(name):
            getattr(home, name)  # imports the module that defines it
        # A notebook cell that runs again defines its class again: the last definition counts.
        named = [kind for kind in classes_of(Saved) if kind.__name__ == name]
        kinds = {(kind.__module__, kind.__qualname__): kind for kind in named}
        if len(kinds) > 1:
            modules = ", ".join(sorted(module for module, _ in kinds))
            raise StoreError(
                f"{path} holds one of several classes {name}, in {modules}; load by one"
            )
        for kind in kinds.values():
            if issubclass(kind, cls):
                return kind
            raise StoreError(
                f"{path} holds a {name}, not a {cls.__name__}; al.Record.load reads any record, "
                "and al.contexts.StoredContext.load any context"
            )
        raise StoreError(
            f"{path} holds a {name}, a class that is not known here; import the module that "
            f"defines it, or use {name}.load(path)"
        )


def classes_of(kind: type[Any]) -> Iterator[type[Any]]:
    """A class and all its subclasses, in the order of their definitions."""
    yield kind
    for subclass in kind.__subclasses__():
        yield from classes_of(subclass)
