"""The only code that imports SGLang: scheduler, admission, request tags, metrics."""
