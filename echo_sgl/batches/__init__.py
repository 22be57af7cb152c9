"""Offline jobs: the OpenAI batch line format."""
