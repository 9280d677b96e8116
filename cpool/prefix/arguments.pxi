# SPDX-License-Identifier: Apache-2.0
# Reading what callers pass, and arrays for what they get.

cdef void* room(size_t count, size_t item_bytes) except NULL:
    # Zero-filled.
    cdef void* data = PyMem_Calloc(count, item_bytes)
    if data == NULL:
        raise MemoryError(f"cannot allocate {count} items of {item_bytes} bytes")
    return data


cdef int fill_array(object array, const block_id_t* ids, size_t count) except -1:
    # `array`: uint32, contiguous, our own.
    cdef Py_buffer view
    if count:
        PyObject_GetBuffer(array, &view, PyBUF_WRITABLE)
        memcpy(view.buf, ids, count * sizeof(block_id_t))
        PyBuffer_Release(&view)
    return 0


cdef object ids_array(const block_id_t* ids, size_t count):
    result = np.empty(count, dtype=np.uint32)
    fill_array(result, ids, count)
    return result


cdef object rows_of(object hashes, uint32_t known_width):
    # Digests in any of the pool's forms as an (n, width) uint8 array.
    check_items(hashes, "hashes", "bytes")
    if not PyObject_CheckBuffer(hashes):
        digests = list(hashes)
        width = len(digests[0]) if digests else known_width or 32
        for i, digest in enumerate(digests):
            if not isinstance(digest, bytes) or len(digest) != width:
                raise TypeError(f"hashes[{i}] is not bytes of length {width}")
        hashes = b"".join(digests)
        known_width = width
    result = np.asarray(hashes) if not isinstance(hashes, bytes) else None
    if result is None or result.ndim == 1:
        result = np.frombuffer(hashes, dtype=np.uint8)
        width = known_width or 32
        if len(result) % width:
            raise ValueError(f"{len(result)} bytes of hashes are no multiple of the width {width}")
        result = result.reshape(-1, width)
    if result.dtype != np.uint8 or result.ndim != 2:
        raise TypeError(
            f"hashes must be (n, width) uint8, not {result.ndim}-dimensional {result.dtype}"
        )
    if len(result) and not 1 <= result.shape[1] <= MAX_HASH_BYTES:
        raise ValueError(
            f"a hash must have 1 to {MAX_HASH_BYTES} bytes, not {result.shape[1]}"
        )
    if result.shape[1] > 1 and result.strides[1] != 1 or result.strides[0] < 0:
        result = np.ascontiguousarray(result)
    return result


cdef uint64_t read_tokens(object value, str what, uint64_t low, uint64_t high) except? 0:
    cdef int overflow = 1
    cdef int64_t small = 0
    if type(value) is int:
        small = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow == 0 and small >= 0 and low <= <uint64_t>small <= high:
        return small
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}")
    number = value.__index__()
    if not low <= number <= high:
        raise ValueError(f"{what} is {number}; it must be from {low} to {high}")
    return number
