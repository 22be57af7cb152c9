"""Servers and requests by chance: `python -m eval.fuzz`."""
