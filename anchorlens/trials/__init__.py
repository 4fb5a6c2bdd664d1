"""How batches run: whether a shortcut gives the same numbers, tried on two prompts."""
