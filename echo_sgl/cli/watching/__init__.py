"""`echo-sgl top`, `stats`, `explain`, `steps`, `trace`, `record`: what a live server does."""
