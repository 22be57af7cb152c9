"""OOCO's experiment on a simulated fleet: `python -m eval.fleet`."""
