"""Prefill/decode integration: the only place that starts engines."""
