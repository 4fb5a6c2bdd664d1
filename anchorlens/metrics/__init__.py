"""Metrics: what each prompt contributes, and the result of all contributions."""

from typing import TYPE_CHECKING

from ..system.package import imported_at_first_use

if TYPE_CHECKING:
    from .accuracy import compare_accuracies as compare_accuracies
    from .edge_sums import flows as flows
    from .loyalties import loyalty as loyalty
    from .segments import rollout as rollout

__getattr__, __dir__, __all__ = imported_at_first_use(__name__, __file__)
