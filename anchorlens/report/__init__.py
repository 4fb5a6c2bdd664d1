"""Results -> one page for people."""
