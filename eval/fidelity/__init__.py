"""The simulator held against real servers: `python -m eval.fidelity`."""
