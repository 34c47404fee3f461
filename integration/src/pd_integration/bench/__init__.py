"""Benchmarks. Every figure is a ratio or a difference from one interleaved run: about us, not about the machine."""
