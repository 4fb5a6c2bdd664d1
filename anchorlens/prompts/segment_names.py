"""The segments of a prompt of demonstrations: what each token is there for."""

from collections.abc import Sequence

SEGMENTS = ("other", "text", "label", "format", "query", "target")
"""Names of the segments: each number in ``PromptBatch.segments`` is an index into these names.

``text`` holds the texts of the demonstrations, ``label`` all tokens of label words, ``format`` the
template and separators around them, ``query`` the query with its format, ``target`` the target
position, and ``other`` the rest (BOS, instructions). Padding is in no segment: its number is -1.
"""

IMAGE = "image"
"""The segment of the tokens of images, after the others in prompts that have some."""

OTHER, TEXT, LABEL, FORMAT, QUERY, TARGET = range(len(SEGMENTS))
PADDING = -1


def of_task(names: Sequence[str]) -> bool:
    """Whether the segments are those of demonstrations and a query, with or without images."""
    return tuple(names) in (SEGMENTS, (*SEGMENTS, IMAGE))
