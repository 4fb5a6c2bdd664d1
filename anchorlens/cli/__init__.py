"""From a shell to the functions above."""
