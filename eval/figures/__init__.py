"""From records of requests and steps to figures."""
