"""Experiments: several runs of one model, compared."""
