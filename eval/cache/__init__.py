"""What the cache finds again, by arm: `python -m eval.cache`."""
