"""Each step held against its limit, and measured."""
