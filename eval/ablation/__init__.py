"""Schedulers compared under promises, on real servers: `python -m eval.ablation`."""
