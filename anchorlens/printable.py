"""Texts of somebody else, as a terminal can show them.

Names of models, texts of data, tokens, names of files and errors of other libraries are printed:
in records, tables, warnings, logs, errors, progress bars and by the commands. Where they leave,
they go through ``printable``.
"""

import re

# Control characters but for line breaks and tabs, which can move the cursor or change the title of
# a terminal; characters that turn the direction of a line; characters without width, with which two
# names look alike; halves of surrogate pairs, which UTF-8 does not have (Python makes them of the
# bytes of a file name that is not UTF-8). The two that join and part letters stay where scripts
# such as that of Persian need them, and emojis.
_NOT_PRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
    "|(?<![\u0080-\U0010ffff])[\u200c\u200d]"
)


def printable(text: str) -> str:
    r"""The text with an escape in place of each character that would command a terminal.

    Examples:
        >>> printable("a \x1b[31mred\x1b[0m model\n")
        'a \\x1b[31mred\\x1b[0m model\n'
    """
    return _NOT_PRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
