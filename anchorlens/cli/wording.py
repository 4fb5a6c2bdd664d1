"""Errors of the library in the words of the command line: options instead of Python arguments."""

import re
from collections.abc import Collection

# A cure of the library names the option and what it is in Python: "(--fresh, in Python
# al.forget_run)". The brackets of a call may stand inside.
_CALL = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
# What the library says, the option that does the same, what a command with this option says
# instead, and what a command without it says.
_REPLACED = (
    (
        "name the right ones (in Python with text= and label=) or rename them",
        "--text-column",
        "name the right ones (--text-column, --label-column) or rename them",
        "rename the right ones to text and label",
    ),
    (
        "; list others in Python with classes=",
        "--classes",
        "; list others with --classes",
        "",
    ),
    ("classes=[", "--classes", "--classes [", "classes=["),
    ("float32 (dtype=torch.float32)", "--dtype", "--dtype float32", "weights in float32"),
    ("the type (dtype)", "--dtype", "the type (--dtype)", "the type"),
    ("one prompt (batch_size=1)", "--batch-size", "one prompt (--batch-size 1)", "one prompt"),
    ("gradient_checkpointing=True", "--gradient-checkpointing", "--gradient-checkpointing", "it"),
    (" (al.forget_run)", "--fresh", " (--fresh)", ""),
    (": delete the file", "--fresh", " (--fresh)", ": delete the file"),
    (
        "a local folder or a .gguf file",
        "--model",
        "a local folder or a .gguf file (--model)",
        "a local folder or a .gguf file",
    ),
    (
        "options={'enable_thinking': False}",
        "--chat-option",
        "--chat-option enable_thinking=false",
        "one that switches thinking off",
    ),
    ("lower shots or ", "--shots", "lower --shots or ", ""),
    ("ask for fewer queries or ", "--queries", "lower --queries or ", ""),
)
# The same for all commands.
_LEFT_OUT = (
    (", or drop_too_long=True in Python", ""),
    (", or resamples=0 for no intervals", ""),
    (
        "load it with attn_implementation='eager', unquantised, or as a HookedTransformer "
        "(transformer-lens 3.9) where that supports it",
        "give unquantised weights, or another model",
    ),
)
# What needs less memory, by the option that does it.
_NEEDS_LESS_MEMORY = {
    "--dtype": "a smaller --dtype",
    "--gradient-checkpointing": "--gradient-checkpointing",
    "--device": "another --device",
}
_REMOVED = (
    re.compile(r", or in Python by \w+=\w+"),
    re.compile(rf", in Python {_CALL}(?=\))"),
    re.compile(rf" \(in Python,? {_CALL}\)"),
    re.compile(r",? or in Python \w+\((?:[^()]|\([^()]*\))*\)"),
)


def in_words_of_the_command(message: str, options: Collection[str]) -> str:
    """The message without what can only be done in Python.

    Args:
        message: A message of the library.
        options: The options of the command.

    Examples:
        >>> in_words_of_the_command("start over (al.forget_run)", ["--fresh"])
        'start over (--fresh)'
    """
    for of_python, option, with_option, without in _REPLACED:
        message = message.replace(of_python, with_option if option in options else without)
    for of_python, of_command in _LEFT_OUT:
        message = message.replace(of_python, of_command)
    for pattern in _REMOVED:
        message = pattern.sub("", message)
    return message


def need_less_memory(options: Collection[str]) -> str:
    """What to do when memory ran out.

    Args:
        options: The options of the command.

    Examples:
        >>> need_less_memory(["--dtype", "--device"])
        'use a smaller --dtype, another --device or a smaller model'
    """
    cures = [cure for option, cure in _NEEDS_LESS_MEMORY.items() if option in options]
    use = f"use {', '.join(cures)} or a smaller model" if cures else "use a smaller model"
    if "--out" not in options:
        return use
    return f"{use}. That is another run, so give it another --out; this one holds what was computed"
