"""Memory that the C library keeps between forward passes on the CPU.

glibc maps every block of 128 KiB or more afresh from the system and gives it back when
it is freed; a large activation then costs a page fault for each 4 KiB, in every pass.
By itself glibc learns to keep such blocks. Dask's nannies set
``MALLOC_TRIM_THRESHOLD_``, which ends that learning: a small convolutional network
then runs at half its speed.
"""

from __future__ import annotations

import ctypes
import platform

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: The largest value glibc accepts for it on 64-bit systems.
_LARGEST_KEPT_BLOCK = 32 * 1024**2


def keep_memory(nbytes: int) -> bool:
    """Let this process keep memory that it frees, for its next allocations.

    Parameters
    ----------
    nbytes
        How much free memory at the end of the heap is kept, in bytes. Blocks of up to
        32 MiB, or half of this, come from the heap.

    Returns
    -------
    bool
        Whether the C library is glibc and took it.

    See Also
    --------
    return_memory : gives it back.

    Examples
    --------
    >>> keep_memory(64 * 1024**2) == (platform.libc_ver()[0] == "glibc")
    True
    """
    if not _is_glibc():
        return False
    libc = ctypes.CDLL(None)
    block = min(nbytes // 2, _LARGEST_KEPT_BLOCK)
    taken = (
        libc.mallopt(_M_MMAP_THRESHOLD, block),
        libc.mallopt(_M_TRIM_THRESHOLD, min(nbytes, 2**31 - 1)),
    )
    return all(taken)


def return_memory() -> None:
    """Give free memory back to the system, where the C library is glibc."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
