"""`echo-sgl calibrate` and `budget`: measure a live server."""
