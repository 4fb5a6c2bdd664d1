"""Turns texts into tokens whose positions are known. No model is touched."""
