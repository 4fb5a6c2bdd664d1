"""A hooked model whose hooks were checked.

The only folder that imports TransformerLens or transformers.
"""
