"""Predictions: pure objects that the server and the simulator share."""
