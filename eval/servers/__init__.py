"""Real servers to measure, what they serve, and what they run on."""
