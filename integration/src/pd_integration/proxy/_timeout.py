"""asyncio.timeout, also on Python 3.10."""

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout  # aiohttp itself depends on it there

__all__ = ["timeout"]
