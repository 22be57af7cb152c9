"""In which order offline requests are taken: by prefix, deadline and worth."""
