"""Writes results as one page for people."""
