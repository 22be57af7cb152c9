"""Who is prefilled in a step, and who waits for the next one."""
