"""Contexts: what can stand before a query, and from what the query is answered."""
