"""Loads on simulated servers, for evaluations that need many of them."""
