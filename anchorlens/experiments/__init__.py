"""Experiments: they compare several runs of a model."""
