"""Metrics: what each prompt contributes, and the result of all contributions."""
