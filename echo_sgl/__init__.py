"""echo-sgl: online and offline traffic together on one stock SGLang server."""

__version__ = "0.1.0"
