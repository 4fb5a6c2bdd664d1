"""Whether this process is one of several, known without an import of PyTorch or accelerate.

The processes are those of accelerate. If the state of accelerate was not made, the process runs
alone.
"""

import os
import sys
from typing import Any


def was_launched() -> bool:
    """Whether `accelerate launch` or `torchrun` started this process."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ or "LOCAL_RANK" in os.environ


def process_count() -> int:
    """How many processes share a run."""
    state = process_state()
    return 1 if state is None else int(state.num_processes)


def is_single_process() -> bool:
    """Whether this process runs alone."""
    return process_count() == 1


def is_main() -> bool:
    """Whether this is the process that prints and writes."""
    state = process_state()
    return state is None or bool(state.is_main_process)


def process_state() -> Any:
    """The accelerate state of this process, or None if it was not made."""
    module = sys.modules.get("accelerate.state")
    if module is None:
        return None
    # PartialState() would make the state. An object made without __init__ only tells whether the
    # state exists; tests/test_private_names.py verifies it.
    made = module.PartialState.__new__(module.PartialState).initialized
    return module.PartialState() if made else None
