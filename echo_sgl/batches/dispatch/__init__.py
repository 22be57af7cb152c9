"""Work through the open batches in the background: check, claim, send, record, end."""
