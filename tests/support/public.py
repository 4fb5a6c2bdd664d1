"""Every public name, at the top of the package or in a module there."""

from typing import Any

import anchorlens as al
from anchorlens.system.package import homes_of


def public() -> dict[str, Any]:
    """The public objects by name; all modules that define them are imported."""
    found = {name: getattr(home, name) for name, home in homes_of("anchorlens").items()}
    return found | {"isolate_random": al.hooks.isolate_random, "relabel": al.relabeling.relabel}
