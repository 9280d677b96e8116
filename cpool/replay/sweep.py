# SPDX-License-Identifier: Apache-2.0
"""Capacities to try when none are asked for."""

_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


def choose_capacities(unique_blocks: int, max_request_blocks: int) -> list[int]:
    """Five capacities in blocks, from a sixteenth of the working set to all of it.

    The working set is what an infinite cache would hold at the end. The last capacity has room
    for it and for one request more. Smaller ones are rounded up to two digits, and are no
    smaller than the largest request, which would be rejected otherwise.
    """
    largest = unique_blocks + max_request_blocks
    sizes = {max(_two_digits(share * unique_blocks), max_request_blocks) for share in _SHARES[:-1]}
    return sorted({size for size in sizes if size < largest} | {largest})


def _two_digits(value: float) -> int:
    whole = max(1, round(value))
    unit = int(10 ** max(0, len(str(whole)) - 2))
    return -(-whole // unit) * unit
