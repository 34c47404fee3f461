"""npu-copy."""

__version__ = "0.1.0"
