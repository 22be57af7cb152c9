"""How long a step may take when offline work is in it."""
