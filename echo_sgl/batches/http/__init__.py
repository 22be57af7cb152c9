"""OpenAI's Files and Batches over HTTP: routes, rules, tenants and their limits."""
