# SPDX-License-Identifier: Apache-2.0
# A msgpack writer: the few types that events need, in their shortest form.
#
# The buffer grows by doubling. A write that finds no memory sets `failed` and writes nothing
# more, so that callers check once, at the end.
from cpool.core.types cimport uint8_t, uint16_t, uint32_t, uint64_t
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.string cimport memcpy


cdef struct Writer:
    uint8_t* data
    size_t size
    size_t capacity
    bint failed


cdef inline uint8_t* room(Writer* writer, size_t count) noexcept:
    # Where the next `count` bytes go, or NULL.
    cdef size_t capacity = writer.capacity
    cdef uint8_t* fresh
    if writer.failed:
        return NULL
    if writer.size + count > capacity:
        capacity = max(2 * capacity, writer.size + count + 256)
        fresh = <uint8_t*>PyMem_RawRealloc(writer.data, capacity)
        if fresh == NULL:
            writer.failed = True
            return NULL
        writer.data = fresh
        writer.capacity = capacity
    writer.size += count
    return writer.data + writer.size - count


cdef inline void release(Writer* writer) noexcept:
    PyMem_RawFree(writer.data)
    writer.data = NULL
    writer.size = 0
    writer.capacity = 0


cdef inline void put(Writer* writer, const void* data, size_t count) noexcept:
    cdef uint8_t* place = room(writer, count)
    if place != NULL:
        memcpy(place, data, count)


cdef inline void tagged(Writer* writer, uint8_t tag, uint64_t value, int num_bytes) noexcept:
    # A type byte and a big-endian number.
    cdef uint8_t* place = room(writer, 1 + num_bytes)
    if place == NULL:
        return
    place[0] = tag
    while num_bytes:
        place[num_bytes] = value & 0xFF
        value >>= 8
        num_bytes -= 1


cdef inline void uint(Writer* writer, uint64_t value) noexcept:
    if value < 0x80:
        tagged(writer, <uint8_t>value, 0, 0)
    elif value <= 0xFF:
        tagged(writer, 0xCC, value, 1)
    elif value <= 0xFFFF:
        tagged(writer, 0xCD, value, 2)
    elif value <= 0xFFFFFFFFU:
        tagged(writer, 0xCE, value, 4)
    else:
        tagged(writer, 0xCF, value, 8)


cdef inline void nil(Writer* writer) noexcept:
    tagged(writer, 0xC0, 0, 0)


cdef inline void array_header(Writer* writer, size_t length) noexcept:
    if length < 16:
        tagged(writer, 0x90 | <uint8_t>length, 0, 0)
    elif length <= 0xFFFF:
        tagged(writer, 0xDC, length, 2)
    else:
        tagged(writer, 0xDD, length, 4)


cdef inline void binary(Writer* writer, const uint8_t* data, uint8_t length) noexcept:
    # Up to 255 bytes: a digest is no longer.
    tagged(writer, 0xC4, length, 1)
    put(writer, data, length)


cdef inline void short_text(Writer* writer, const char* text, uint8_t length) noexcept:
    # Up to 31 bytes of UTF-8.
    tagged(writer, 0xA0 | length, 0, 0)
    put(writer, text, length)
