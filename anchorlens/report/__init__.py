"""Writes results as one page for people."""

import sys
from types import ModuleType

from ..other_words import instead_of


class _Folder(ModuleType):
    def __call__(self, *args: object, **options: object) -> None:
        raise TypeError(f"al.report is a folder of the package{instead_of('report')}")


sys.modules[__name__].__class__ = _Folder
