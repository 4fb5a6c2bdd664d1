"""The machine: files, processes, signals. Nothing here knows what a language model is."""
