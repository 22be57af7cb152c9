"""One job on one server and on two: `python -m eval.two_servers`."""
