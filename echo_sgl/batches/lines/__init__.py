"""A job file: its lines, checked and in order, and what was answered to each."""
