# SPDX-License-Identifier: Apache-2.0
# The bytes that a digest is taken of: `(parent, (token, ...), extra_keys)` in pickle
# protocol 5, as CPython's C pickler writes it, or in canonical CBOR (RFC 8949, 4.2).
#
#   pickle  80 05 | 95 frame length | 'C' width parent 94 | '(' tokens 't' 94 | tail
#   CBOR    83    | byte string header, parent            | array header, tokens | tail
#
# 94 memoizes: the parent is entry 0, the token tuple entry 1, so whatever the tail
# memoizes starts at entry 2 in every block. Tuples of 1 to 3 tokens have opcodes of their
# own and no mark. The tail, which holds the extra keys, is the caller's.
#
# Every function writes at `p` and returns the place after what it wrote. A token takes at
# most MAX_TOKEN_BYTES, but a write may touch that many bytes whatever it returns.

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    MAX_TOKEN_BYTES = 10
    MAX_HEADER_BYTES = 32  # all that is neither parent, token nor tail
    # Protocol, frame opcode and length; the frame counts what follows these.
    FRAME_HEADER_BYTES = 11
    # From here on the pickler may start a new frame, and one frame is no longer right.
    FRAME_BYTES_LIMIT = 65536


cdef inline unsigned char* put_pickle_int(unsigned char* p, int64_t value) noexcept nogil:
    cdef uint32_t low = <uint32_t> value
    cdef uint64_t bits = <uint64_t> value
    cdef int num_bytes = 8
    cdef int i
    cdef uint32_t over_1_byte, over_2_bytes
    if -2147483648 <= value <= 2147483647:
        # BININT1 (75), BININT2 (77) or BININT (74), by arithmetic because sizes alternate at
        # random and no branch would be predicted. A negative value has high bits set and so
        # takes BININT, as it must.
        over_1_byte = low > 0xFF
        over_2_bytes = low > 0xFFFF
        p[0] = <unsigned char> (75 + 2 * over_1_byte - 3 * over_2_bytes)
        p[1] = <unsigned char> low
        p[2] = <unsigned char> (low >> 8)
        p[3] = <unsigned char> (low >> 16)
        p[4] = <unsigned char> (low >> 24)
        return p + 2 + over_1_byte + 2 * over_2_bytes
    p[0] = 0x8A  # LONG1: length, then the shortest little-endian two's complement
    for i in range(8):
        p[2 + i] = <unsigned char> (bits >> (8 * i))
    while p[1 + num_bytes] == (0xFF if value < 0 else 0) and (
        (p[num_bytes] & 0x80) == (0x80 if value < 0 else 0)
    ):
        num_bytes -= 1
    p[1] = <unsigned char> num_bytes
    return p + 2 + num_bytes


cdef inline unsigned char* put_cbor_head(
    unsigned char* p, unsigned char major, uint64_t value
) noexcept nogil:
    """Write an initial byte of `major` type (already shifted) with its argument."""
    cdef int size_class, num_bytes, i
    cdef uint64_t aligned
    if value >> 32 == 0:
        # Arguments of 0, 1, 2 or 4 bytes without a branch.
        size_class = (value > 23) + (value > 0xFF) + (value > 0xFFFF)
        num_bytes = size_class + (size_class == 3)
        p[0] = major | <unsigned char> (<uint64_t> (23 + size_class) if size_class else value)
        aligned = value << (8 * (4 - num_bytes))
        p[1] = <unsigned char> (aligned >> 24)
        p[2] = <unsigned char> (aligned >> 16)
        p[3] = <unsigned char> (aligned >> 8)
        p[4] = <unsigned char> aligned
        return p + 1 + num_bytes
    p[0] = major | 27
    for i in range(8):
        p[1 + i] = <unsigned char> (value >> (56 - 8 * i))
    return p + 9


cdef inline unsigned char* put_cbor_int(unsigned char* p, int64_t value) noexcept nogil:
    if value >= 0:
        return put_cbor_head(p, 0x00, <uint64_t> value)
    return put_cbor_head(p, 0x20, <uint64_t> (-1 - value))


cdef inline unsigned char* put_pickle_block(
    unsigned char* p,
    const unsigned char* parent,
    Py_ssize_t width,
    const int64_t* tokens,
    Py_ssize_t num_tokens,
) noexcept nogil:
    """Write all up to the tail; the frame length stays open for `close_pickle_frame`."""
    cdef Py_ssize_t i
    p[0] = 0x80
    p[1] = 5
    p[2] = 0x95
    p += FRAME_HEADER_BYTES
    p[0] = 67  # SHORT_BINBYTES
    p[1] = <unsigned char> width
    memcpy(p + 2, parent, width)
    p += 2 + width
    p[0] = 0x94
    p += 1
    if num_tokens > 3:
        p[0] = 40  # MARK
        p += 1
    for i in range(num_tokens):
        p = put_pickle_int(p, tokens[i])
    p[0] = 116 if num_tokens > 3 else <unsigned char> (0x84 + num_tokens)
    p[1] = 0x94
    return p + 2


cdef inline void close_pickle_frame(unsigned char* start, Py_ssize_t num_bytes) noexcept nogil:
    cdef uint64_t frame_bytes = <uint64_t> (num_bytes - FRAME_HEADER_BYTES)
    cdef int i
    for i in range(8):
        start[3 + i] = <unsigned char> (frame_bytes >> (8 * i))


cdef inline unsigned char* put_cbor_block(
    unsigned char* p,
    const unsigned char* parent,
    Py_ssize_t width,
    const int64_t* tokens,
    Py_ssize_t num_tokens,
) noexcept nogil:
    """Write all up to the tail."""
    cdef Py_ssize_t i
    p[0] = 0x83
    p = put_cbor_head(p + 1, 0x40, <uint64_t> width)
    memcpy(p, parent, width)
    p = put_cbor_head(p + width, 0x80, <uint64_t> num_tokens)
    for i in range(num_tokens):
        p = put_cbor_int(p, tokens[i])
    return p
