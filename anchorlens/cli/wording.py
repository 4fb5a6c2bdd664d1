"""Errors of the library in the words of the command line: options instead of Python arguments."""

import re

# A cure of the library names the option and what it is in Python: "(--fresh, in Python
# al.forget_rows)". The brackets of a call may stand inside.
_CALL = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_REPLACED = (
    (
        "load it with attn_implementation='eager', unquantised, or as a HookedTransformer "
        "(transformer-lens 3.9) where that supports it",
        "give unquantised weights, or another model",
    ),
    ("in Python with text= and label=", "--text-column, --label-column"),
    ("list others in Python with classes=", "list others with --classes"),
    ("classes=[", "--classes ["),
    ("lower shots or", "lower --shots or"),
    ("ask for fewer queries or", "lower --queries or"),
    (", or drop_too_long=True in Python", ""),
    (", or resamples=0 for no intervals", ""),
)
_REMOVED = (
    re.compile(r", or in Python by \w+=\w+"),
    re.compile(rf", in Python {_CALL}(?=\))"),
    re.compile(rf" \(in Python,? {_CALL}\)"),
    re.compile(r",? or in Python \w+\((?:[^()]|\([^()]*\))*\)"),
)


def in_words_of_the_command(message: str) -> str:
    """The message without what can only be done in Python.

    Examples:
        >>> in_words_of_the_command("start over (--fresh, in Python al.forget_rows)")
        'start over (--fresh)'
    """
    for of_python, of_command in _REPLACED:
        message = message.replace(of_python, of_command)
    for pattern in _REMOVED:
        message = pattern.sub("", message)
    return message
