"""Presets that ship with the package."""
