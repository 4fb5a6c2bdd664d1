"""Experiments: what needs more than the pass of a run, which metrics read.

A question that ``al.run`` takes is a class: read ``edge_sweep`` first, ``context_comparison``,
``faithfulness``, ``integrated_flows`` and ``prefix_effect`` then. A function is what needs prompts
of several lists, and so is no question: ``head_effects``, ``task_vectors`` and ``retrieval_heads``
read one list and ask of another, ``label_dependence`` compares answers after several. ``analysis``,
``diagnosis`` and ``random_weights`` ask questions that are there; ``saliency``, ``step_flows`` and
``generation`` look at single prompts. All other files help one of these.
"""
