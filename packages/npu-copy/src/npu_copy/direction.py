"""The two ways a block can go."""

from enum import Enum


class Direction(Enum):
    """STORE copies device to host (D2H), LOAD host to device (H2D)."""

    STORE = "store"
    LOAD = "load"
