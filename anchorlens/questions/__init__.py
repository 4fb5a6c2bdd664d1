"""Questions of more than one pass a batch, which ``al.run`` takes beside metrics.

Each is a class in a file of its own: what it asks, the passes it makes, its record. Read
``edge_sweep`` first, then ``score_parts``, ``context_comparison`` and ``faithfulness``. ``sites``
names the layers and heads of sweeps, ``prefix_terms`` has the terms of ``prefix_effect``. What
needs several lists of prompts is no question, but a function in ``experiments``.
"""
