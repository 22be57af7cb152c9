"""`echo-sgl batch`: job files against a server with a batch service, or any other."""
