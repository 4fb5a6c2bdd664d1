"""The groups of tokens: what each token of a prompt is there for."""

GROUPS = ("other", "text", "label", "format", "query", "target")
"""Names of the token groups; the index of a name is its number in ``PromptBatch.groups``.

``text`` holds demonstration texts, ``label`` label words, ``format`` the template and separators
around them, ``query`` the query with its format, ``target`` the target position, and ``other`` the
rest (BOS, instructions). Padding is -1.
"""

OTHER, TEXT, LABEL, FORMAT, QUERY, TARGET = range(len(GROUPS))
PADDING = -1
