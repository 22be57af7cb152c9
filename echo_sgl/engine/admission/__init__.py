"""Who is prefilled: online requests first, offline ones in what these leave."""
