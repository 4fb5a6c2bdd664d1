"""Metrics: each says what one prompt contributes, and what follows from all contributions."""
