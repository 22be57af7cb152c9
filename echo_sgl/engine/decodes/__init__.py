"""Who of the running requests decodes, who sits out, and who gives up memory."""
