"""Arms compared without promises: `python -m eval.corun`."""
