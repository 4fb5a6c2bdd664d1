"""Errors of somebody else's code: the forward of a model, or TransformerLens, may raise anything.

An error of an architecture is a reason, in a line. A mistake of this package is never one: it is
raised, or, where a slower way remains, logged for those who look for it, and an error in the tests.
"""

import sys
from traceback import walk_tb

from ..errors import AnchorlensError
from ..system.warn import log_of

_log = log_of(__name__)

# Where an error is raised here, the code that called it is to blame.
_TOOLS = {"beartype", "einops", "jaxtyping", "numpy", "torch"} | sys.stdlib_module_names


def origin_of(error: BaseException) -> str:
    """The package whose code raised an error: the last in the traceback that is no tool."""
    modules = [each.f_globals.get("__name__", "") for each, _ in walk_tb(error.__traceback__)]
    packages = [str(module).partition(".")[0] for module in modules]
    return next((name for name in reversed(packages) if name not in _TOOLS), "")


def is_own_mistake(error: BaseException) -> bool:
    """Whether this package is to blame. Operations on tensors of unknown shapes may fail."""
    expected = isinstance(error, (AnchorlensError, RuntimeError))
    return not expected and origin_of(error) == __name__.partition(".")[0]


def in_a_line(error: BaseException) -> str:
    """What an error says, in a line, with its type where its text alone may say little."""
    text = str(error).partition("\n")[0][:200]
    if text and isinstance(error, (ValueError, RuntimeError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reason_of_failure(error: Exception, doing: str) -> str:
    """Why a quicker way cannot be used, in a line; an own mistake is logged too."""
    if is_own_mistake(error):
        _log.debug("%s failed by a mistake of anchorlens", doing, exc_info=error)
    return in_a_line(error)
