"""What a server would do, without the server: the same policies on simulated steps."""
