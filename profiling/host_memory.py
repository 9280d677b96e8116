# SPDX-License-Identifier: Apache-2.0
"""Keeps what the machine does with free memory out of the figures."""

import ctypes
import mmap

import numpy as np

MIN_BACKED_BYTES = 128 << 20
BYTES_PER_BLOCK = 256  # more than either pool takes for a new block, or for a key of one
M_TRIM_THRESHOLD = -1  # of glibc's malloc.h
HEAP_BYTES = 64 << 20


def keep_heap_mapped():
    """What results take from the heap is mapped already, as it is in a process of some age."""
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 1 << 30)
    held = [bytes(1000) for _ in range(HEAP_BYTES // 1000)]
    del held


def back_memory(nbytes=MIN_BACKED_BYTES):
    """Have memory at hand behind the pages that the system hands out next.

    A virtual machine may have given its free pages back to the host, two seconds after they
    were freed. Each then costs a walk through the hypervisor, 3 ns a byte where this was written:
    more than all that a pool does, and it falls on whoever comes first.
    """
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        pages.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(pages, np.uint8)[:: mmap.PAGESIZE] = 1
