"""The segments of a prompt of demonstrations: what each token is there for."""

SEGMENTS = ("other", "text", "label", "format", "query", "target")
"""Names of the segments: each number in ``PromptBatch.segments`` is an index into these names.

``text`` holds the texts of the demonstrations, ``label`` all tokens of label words, ``format`` the
template and separators around them, ``query`` the query with its format, ``target`` the target
position, and ``other`` the rest (BOS, instructions). Padding is in no segment: its number is -1.
``al.edges.segment(batch, name)`` gives the positions of a segment.
"""

OTHER, TEXT, LABEL, FORMAT, QUERY, TARGET = range(len(SEGMENTS))
PADDING = -1
