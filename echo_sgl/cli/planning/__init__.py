"""`echo-sgl plan`: how much hardware a trace needs."""
