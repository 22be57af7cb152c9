"""Workloads, real-server runs of stock against Echo, and what they showed."""
