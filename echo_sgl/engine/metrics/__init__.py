"""What a scheduler did, on `/metrics`, in load reports and in recordings."""
