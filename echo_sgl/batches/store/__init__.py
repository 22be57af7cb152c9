"""The job store: files, batches and lines in one database, so that a crash loses nothing."""
