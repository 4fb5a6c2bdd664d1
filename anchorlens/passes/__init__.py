"""One batch through the model, once."""
