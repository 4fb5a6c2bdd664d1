"""Warnings name the line of the user's code that called the package, however deep they arise."""

import inspect
import warnings

_PACKAGE = __name__.partition(".")[0]


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the package."""
    frame, depth, level = inspect.currentframe(), 0, 1
    while frame is not None:
        depth += 1
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        # A context manager that decorates a function calls it from contextlib.
        if module == _PACKAGE or (module == "contextlib" and depth == level):
            level = depth + 1  # the caller of the outermost function of the package so far
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
