"""Experiments: functions around runs, for what needs several lists of prompts or a single prompt.

``analysis``, ``diagnosis`` and ``random_weights`` ask questions that are there. ``head_effects``,
``task_vectors`` and ``retrieval_heads`` read one list of prompts and ask of another,
``label_dependence`` compares answers after several. ``saliency``, ``step_flows`` and
``generation`` look at single prompts. What ``al.run`` can answer belongs in ``questions``.
"""
