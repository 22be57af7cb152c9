"""What runs in SGLang's HTTP process: routes, tags, turns, and handing requests back."""
