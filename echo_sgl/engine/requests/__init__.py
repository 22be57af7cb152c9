"""What Echo knows of a request of SGLang's: class, terms, place, and why it waits."""
