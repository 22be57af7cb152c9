"""SGLang's radix cache with an order of eviction of our own, and what may be held of its memory."""
