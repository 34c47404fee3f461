"""Benchmarks. Every figure is a ratio or a difference taken in one interleaved run: this is about us, not the machine."""
