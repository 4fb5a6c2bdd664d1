"""The paper's figures and tables for your model."""

from typing import TYPE_CHECKING

from ..system.package import imported_at_first_use

if TYPE_CHECKING:
    from .figures import paper_figures as paper_figures
    from .models_compared import across_models as across_models
    from .paper_parts import PAPER_APPENDIX as PAPER_APPENDIX
    from .paper_parts import PAPER_BASELINES as PAPER_BASELINES
    from .paper_parts import PAPER_PARTS as PAPER_PARTS
    from .paper_parts import PaperNumber as PaperNumber
    from .paper_parts import PaperSetting as PaperSetting
    from .tables import paper_tables as paper_tables

__getattr__, __dir__, __all__ = imported_at_first_use(__name__, __file__)
