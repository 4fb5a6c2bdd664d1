"""Segments taken out of prompts, and what the answer is without them.

``removal`` says how a segment is taken out, ``subsets`` which ones are taken out together and
what follows from the answers, ``likelihood`` runs them, ``segment_scores`` makes one tensor of
any scores. Questions and their records are in ``questions``.
"""
