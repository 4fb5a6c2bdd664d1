"""What can stand before a query and answer it."""
