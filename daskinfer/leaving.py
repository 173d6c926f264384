"""What is read piece by piece, and left before its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Leaving(ABC):
    """Closed where a ``with`` or an ``async with`` ends, and by ``aclosing``."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading. Returns at once; harmless when repeated."""

    async def aclose(self) -> None:
        """As :meth:`close`, for ``contextlib.aclosing``."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.close()
