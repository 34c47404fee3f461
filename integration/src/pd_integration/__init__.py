"""Prefill/decode integration: the only place that starts engines."""

__version__ = "0.1.0"
