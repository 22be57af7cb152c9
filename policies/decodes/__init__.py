"""Who decodes in a step, and who sits out."""
