"""A hooked model whose hooks were verified.

The only folder that imports TransformerLens or transformers.
"""
