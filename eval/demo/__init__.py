"""What `make demo` runs: `python -m eval.demo`."""
