"""What of Python's values a trace depends on: guards, and the cache of traces."""
