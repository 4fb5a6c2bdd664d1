"""Turns texts into tokens whose positions are known. No model is touched."""

from typing import TYPE_CHECKING

from ..system.package import imported_at_first_use

if TYPE_CHECKING:
    from .build import text_anchor_prompts as text_anchor_prompts
    from .edge_set import EdgeSet as EdgeSet
    from .task_file import read_task as read_task
    from .verbalizer import Verbalizer as Verbalizer

__getattr__, __dir__, __all__ = imported_at_first_use(__name__, __file__)
