# SPDX-License-Identifier: Apache-2.0
"""The block size of a trace, from its own numbers.

A request with n ids and L tokens allows the block sizes b with n = ceil(L / b), or, in a trace
that leaves partial blocks out, n = floor(L / b). A few requests leave few sizes, and engines
use powers of two: if exactly one remains, or only one size at all, that is it.
"""

from collections.abc import Sequence

from cpool.replay.records import Request, TraceError

NUM_SAMPLES = 64  # requests looked at
MAX_BLOCK_SIZE = 1 << 30  # tokens


def infer_block_size(requests: Sequence[Request], name: str) -> tuple[int, str]:
    """The block size in tokens, and how it was found.

    Raises:
        TraceError: the requests allow no block size, or several.
    """
    if not requests:
        raise TraceError(f"{name}: the trace has no requests")
    ranges = [_allowed(requests, is_ceil=True), _allowed(requests, is_ceil=False)]
    powers = [1 << k for k in range(31) if any(1 << k in sizes for sizes in ranges)]
    how = f"inferred from the first {len(requests)} requests"
    if len(powers) == 1:
        return powers[0], how
    few = {size for sizes in ranges for size in sizes[:2]}
    if not powers and len(few) == 1:
        return few.pop(), how
    possible = ", ".join(map(str, (powers or sorted(few))[:6])) or "none"
    raise TraceError(
        f"{name}: the first {len(requests)} requests do not tell the block size "
        f"(possible: {possible}); give it with --block-size"
    )


def _allowed(requests: Sequence[Request], is_ceil: bool) -> range:
    low, high = 1, MAX_BLOCK_SIZE
    for request in requests:
        tokens, blocks = request.input_length, len(request.hash_ids)
        if is_ceil:
            # (n - 1) * b < L <= n * b
            low = max(low, -(-tokens // blocks) if blocks else MAX_BLOCK_SIZE + 1)
            if blocks > 1:
                high = min(high, (tokens - 1) // (blocks - 1))
        else:
            # n * b <= L < (n + 1) * b
            low = max(low, tokens // (blocks + 1) + 1)
            if blocks:
                high = min(high, tokens // blocks)
    return range(low, high + 1)
