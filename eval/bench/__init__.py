"""Our code against stock code: `make bench`, `python -m eval.bench --only NAME`."""
