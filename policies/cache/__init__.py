"""What of the KV cache is kept for whom, and whose memory goes first."""
