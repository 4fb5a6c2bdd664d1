"""Questions of more than one pass a batch, which ``al.run`` takes beside metrics.

Each is a class in a file of its own: what it asks, the passes it makes, its record. Read
``edge_sweep`` first. What needs several lists of prompts is a function in ``experiments``.
"""
