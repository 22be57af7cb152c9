"""All committed results on one page: `make report`."""
