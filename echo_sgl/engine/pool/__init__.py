"""Where offline requests wait: the pool, their deadlines, and who of them is next."""
