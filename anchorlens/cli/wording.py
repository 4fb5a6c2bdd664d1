"""Errors of the library in the words of the command line: options instead of Python arguments."""

import re
from collections.abc import Collection

# What a message of the library names, where the option that does the same has another name.
_OPTIONS = {
    "al.forget_run": "--fresh",
    "folder=": "--out",
    "image=": "--image-column",
    "label=": "--label-column",
    "seeds=": "--seed",
    "source=": "--model",
    "text=": "--text-column",
}
_ONLY_IN_PYTHON = (
    r", or (resamples=0 for no intervals|AnchorDistances\(directions=\d+\)"
    r"|build_prompts\(.*?drop_too_long=True\))"
)
# What needs less memory, by the option that does it.
_NEEDS_LESS_MEMORY = {
    "--dtype": "a smaller --dtype",
    "--gradient-checkpointing": "--gradient-checkpointing",
    "--device": "another --device",
}


def in_words_of_the_command(message: str, options: Collection[str]) -> str:
    """A message of the library with options of the command for the arguments that they set."""
    named_alike = {f"{option[2:].replace('-', '_')}=": option for option in options}
    for argument, option in {**_OPTIONS, **named_alike}.items():
        if option in options:
            named = rf"(?<![\w.]){argument}(?:torch\.|True\b)?"
            message = re.sub(rf"{named}(?=[\w'\"[-])", f"{option} ", message)
            message = re.sub(named, option, message)
    return re.sub(_ONLY_IN_PYTHON, "", message)


def need_less_memory(options: Collection[str]) -> str:
    """What to do when memory ran out, with the options of the command.

    Examples:
        >>> need_less_memory(["--dtype", "--device"])
        'use a smaller --dtype, another --device or a smaller model'
    """
    cures = [cure for option, cure in _NEEDS_LESS_MEMORY.items() if option in options]
    use = f"use {', '.join(cures)} or a smaller model" if cures else "use a smaller model"
    if "--out" not in options:
        return use
    return f"{use}. That is another run, so give it another --out; this one holds what was computed"
