"""The paper's figures and tables for your model."""

from typing import TYPE_CHECKING

from ..system.package import imported_at_first_use

if TYPE_CHECKING:
    from .beside_published import paper_tables as paper_tables
    from .models_compared import across_models as across_models

__getattr__, __dir__, __all__ = imported_at_first_use(__name__, __file__)
