"""The groups of tokens: what each token of a prompt is there for."""

GROUPS = ("other", "text", "label", "format", "query", "target")
"""Names of the token groups: each number in ``PromptBatch.groups`` is an index into these names.

``text`` holds the texts of the demonstrations, ``label`` all tokens of label words, ``format`` the
template and separators around them, ``query`` the query with its format, ``target`` the target
position, and ``other`` the rest (BOS, instructions). Padding is in no group: its number is -1.
``al.edges.group(batch, name)`` gives the positions of a group.
"""

OTHER, TEXT, LABEL, FORMAT, QUERY, TARGET = range(len(GROUPS))
PADDING = -1
