"""Warnings name the line of the user's code that called the package, however deep they arise.

Warnings and logs of the package hold names and errors of others, and are printed from here alone.
"""

import inspect
import logging
import warnings

from ..printable import printable

_PACKAGE_NAME = __name__.partition(".")[0]


def warn_user(message: str) -> None:
    """Warn at the line that called the package."""
    frame, depth, level = inspect.currentframe(), 0, 1
    while frame is not None:
        depth += 1
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        # A context manager that decorates a function calls it from contextlib.
        if module == _PACKAGE_NAME or (module == "contextlib" and depth == level):
            level = depth + 1  # the caller of the outermost function of the package so far
        frame = frame.f_back
    warnings.warn(printable(message), stacklevel=level)


class _Printable(logging.Filter):
    """Makes a record of a log printable, with the traceback of its error."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info:
            # What a formatter takes, if it is there, instead of the error itself.
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
        return True


_printable = _Printable()


def log_of(name: str) -> logging.Logger:
    log = logging.getLogger(name)
    log.addFilter(_printable)
    return log
