# SPDX-License-Identifier: Apache-2.0
# Reading arguments: block ids and hashes, in whatever form callers hold them.

@cython.freelist(8)
cdef class IdBatch:
    """Block ids as uint32, checked against the pool's size."""

    def __cinit__(self):
        self.has_view = False

    def __dealloc__(self):
        if self.has_view:
            PyBuffer_Release(&self.view)


@cython.freelist(8)
cdef class IdBuffer:
    """Room for block ids."""

    def __dealloc__(self):
        PyMem_Free(self.ids)


cdef IdBuffer make_buffer(size_t count):
    cdef IdBuffer buffer = IdBuffer.__new__(IdBuffer)
    buffer.ids = <block_id_t*>PyMem_Malloc((count + 1) * sizeof(block_id_t))
    if buffer.ids == NULL:
        raise MemoryError(f"cannot allocate room for {count} block ids")
    buffer.count = count
    return buffer


@cython.freelist(8)
cdef class TokenBuffer:
    """Room for token counts."""

    def __cinit__(self, size_t count):
        self.values = <uint64_t*>PyMem_Malloc((count + 1) * sizeof(uint64_t))
        if self.values == NULL:
            raise MemoryError(f"cannot allocate room for {count} token counts")

    def __dealloc__(self):
        PyMem_Free(self.values)


cdef inline bint is_array(object value, int type_number, int num_dimensions) noexcept:
    # Whether the memory of a numpy array can be read as it is. Asking for a buffer takes
    # longer than looking 64 blocks up.
    return (
        numpy.PyArray_CheckExact(value)
        and numpy.PyArray_TYPE(<numpy.ndarray>value) == type_number
        and numpy.PyArray_NDIM(<numpy.ndarray>value) == num_dimensions
        and numpy.PyArray_ISBEHAVED_RO(<numpy.ndarray>value)
    )


cdef IdBatch read_ids(object ids, uint32_t num_blocks):
    cdef IdBatch batch = IdBatch.__new__(IdBatch)
    if not PyObject_CheckBuffer(ids):
        ids = ids_as_array(ids, num_blocks)
    if is_array(ids, numpy.NPY_INT64, 1):
        read_wide_ids(batch, <numpy.ndarray>ids, num_blocks)
        return batch
    if is_array(ids, numpy.NPY_UINT32, 1):
        batch.kept = ids
        batch.count = numpy.PyArray_DIM(<numpy.ndarray>ids, 0)
        set_ids(
            batch, <const char*>numpy.PyArray_DATA(<numpy.ndarray>ids),
            numpy.PyArray_STRIDE(<numpy.ndarray>ids, 0),
        )
    else:
        read_id_buffer(batch, ids, num_blocks)
    return check_ids(batch, num_blocks)


cdef int read_wide_ids(IdBatch batch, numpy.ndarray ids, uint32_t num_blocks) except -1:
    # int64, which is what look-ups return and lists become.
    cdef size_t count = numpy.PyArray_DIM(ids, 0)
    cdef Py_ssize_t stride = numpy.PyArray_STRIDE(ids, 0)
    cdef const char* data = <const char*>numpy.PyArray_DATA(ids)
    cdef IdBuffer copied = make_buffer(count)
    cdef int64_t id
    cdef size_t i
    for i in range(count):
        id = (<const int64_t*>(data + <Py_ssize_t>i * stride))[0]
        if not 0 <= id < <int64_t>num_blocks:
            raise BlockIdError(
                f"block id {id} at position {i} is out of range: "
                f"the pool has {num_blocks} blocks"
            )
        copied.ids[i] = <block_id_t>id
    batch.kept = copied
    batch.ids = copied.ids
    batch.count = count
    return 0


cdef int set_ids(IdBatch batch, const char* data, Py_ssize_t stride) except -1:
    # A reversed or thinned-out array, as in free_ids(ids[::-1]), is copied.
    cdef IdBuffer copied
    cdef size_t i
    batch.ids = <const block_id_t*>data
    if stride != sizeof(block_id_t) and batch.count > 1:
        copied = make_buffer(batch.count)
        for i in range(batch.count):
            memcpy(&copied.ids[i], data + <Py_ssize_t>i * stride, sizeof(block_id_t))
        batch.kept = copied
        batch.ids = copied.ids
    return 0


cdef IdBatch check_ids(IdBatch batch, uint32_t num_blocks):
    cdef size_t i
    cdef block_id_t largest = 0
    for i in range(batch.count):
        largest = max(largest, batch.ids[i])
    if largest >= num_blocks:
        for i in range(batch.count):
            if batch.ids[i] >= num_blocks:
                raise BlockIdError(
                    f"block id {batch.ids[i]} at position {i} is out of range: "
                    f"the pool has {num_blocks} blocks"
                )
    return batch


cdef int read_id_buffer(IdBatch batch, object ids, uint32_t num_blocks) except -1:
    PyObject_GetBuffer(ids, &batch.view, PyBUF_STRIDED_RO | PyBUF_FORMAT)
    batch.has_view = True
    if batch.view.ndim != 1:
        raise TypeError(f"block ids must be one-dimensional, not {batch.view.ndim}-dimensional")
    if not (
        batch.view.itemsize == 4
        and batch.view.format != NULL
        and batch.view.format[0] in (b"I", b"L")
        and batch.view.format[1] == 0
    ):
        batch.kept = ids_as_uint32(ids, num_blocks)
        PyBuffer_Release(&batch.view)
        batch.has_view = False
        PyObject_GetBuffer(batch.kept, &batch.view, PyBUF_STRIDED_RO | PyBUF_FORMAT)
        batch.has_view = True
    batch.count = batch.view.len // 4
    return set_ids(
        batch, <const char*>batch.view.buf,
        batch.view.strides[0] if batch.view.strides != NULL else 4,
    )


cdef inline bint is_inert(object argument) noexcept:
    # Whether nothing of the caller's runs when it is read.
    return argument is None or type(argument) is numpy.ndarray


cdef int copy_ids(IdBatch batch) except -1:
    # The ids as they were checked, whatever happens to the caller's array from now on.
    cdef IdBuffer copied = make_buffer(batch.count)
    memcpy(copied.ids, batch.ids, batch.count * sizeof(block_id_t))
    batch.kept = copied
    batch.ids = copied.ids
    return 0


cdef int check_items(object items, str what, str kind) except -1:
    # Whether that can be a sequence of such things.
    if isinstance(items, (str, dict)) or not (
        hasattr(items, "__iter__") or hasattr(items, "__getitem__")
    ):
        raise TypeError(f"{what} must be {kind}, not {type(items).__name__}")
    return 0


cdef object ids_as_array(object ids, uint32_t num_blocks):
    check_items(ids, "block ids", "integers")
    if not isinstance(ids, (list, tuple)):
        ids = list(ids)
    for i, id in enumerate(ids):
        if isinstance(id, bool) or not isinstance(id, (int, np.integer)):
            raise TypeError(
                f"block ids must be integers: {id!r} at position {i} is a {type(id).__name__}"
            )
        if not -(1 << 63) <= id < 1 << 63:
            raise BlockIdError(
                f"block id {id} at position {i} is out of range: "
                f"the pool has {num_blocks} blocks"
            )
    return np.array(ids, dtype=np.int64)


cdef object ids_as_uint32(object ids, uint32_t num_blocks):
    values = np.asarray(ids)
    if values.dtype.kind not in "iu":
        raise TypeError(f"block ids must be integers, not {values.dtype}")
    bad = (values < 0) | (values >= num_blocks)
    if bad.any():
        position = int(bad.argmax())
        raise BlockIdError(
            f"block id {values[position]} at position {position} is out of range: "
            f"the pool has {num_blocks} blocks"
        )
    return np.ascontiguousarray(values, dtype=np.uint32)


@cython.freelist(8)
cdef class HashBatch:
    """Digests of one width; row i starts at ``rows + i * row_bytes``."""

    def __cinit__(self):
        self.has_view = False

    def __dealloc__(self):
        if self.has_view:
            PyBuffer_Release(&self.view)

    cdef bytes row(self, size_t i):
        return PyBytes_FromStringAndSize(
            <const char*>(self.rows + i * self.row_bytes), self.width
        )


cdef inline int check_width(Py_ssize_t width) except -1:
    if not 1 <= width <= MAX_HASH_BYTES:
        raise ValueError(f"a hash must have 1 to {MAX_HASH_BYTES} bytes, not {width}")
    return 0


cdef HashBatch join_hashes(object hashes, Py_ssize_t expected, uint32_t known_width):
    # As read_hashes, for a sequence of equally long bytes.
    cdef HashBatch batch = HashBatch.__new__(HashBatch)
    cdef Py_ssize_t width = 0, i
    cdef list rows
    cdef char* place
    check_items(hashes, "hashes", "bytes")
    rows = hashes if type(hashes) is list else list(hashes)
    for i in range(len(rows)):
        row = rows[i]
        if not isinstance(row, bytes):
            raise TypeError(
                f"hashes must be bytes: position {i} holds a {type(row).__name__}"
            )
        if i == 0:
            width = PyBytes_GET_SIZE(row)
            check_width(width)
        elif PyBytes_GET_SIZE(row) != width:
            raise ValueError(
                f"hash at position {i} has {PyBytes_GET_SIZE(row)} bytes, the first one {width}"
            )
    batch.count = len(rows)
    batch.kept = PyBytes_FromStringAndSize(NULL, width * len(rows))
    place = PyBytes_AS_STRING(batch.kept)
    for i in range(len(rows)):
        memcpy(place, PyBytes_AS_STRING(rows[i]), width)
        place += width
    batch.rows = <const uint8_t*>PyBytes_AS_STRING(batch.kept)
    batch.width = <uint32_t>width if rows else (known_width if known_width else 32)
    batch.row_bytes = batch.width
    return check_rows(batch, expected)


cdef HashBatch read_hashes(object hashes, Py_ssize_t expected, uint32_t known_width):
    # `expected` rows, or -1 for any number. A flat buffer is cut into rows by the number
    # expected, else by `known_width` (of the pool's keys), else by 32.
    cdef HashBatch batch
    cdef Py_ssize_t length
    if type(hashes) is list:
        return join_hashes(hashes, expected, known_width)
    batch = HashBatch.__new__(HashBatch)
    if is_array(hashes, numpy.NPY_UINT8, 2) and is_row_array(<numpy.ndarray>hashes):
        batch.kept = hashes
        batch.count = numpy.PyArray_DIM(<numpy.ndarray>hashes, 0)
        batch.width = <uint32_t>numpy.PyArray_DIM(<numpy.ndarray>hashes, 1)
        batch.row_bytes = numpy.PyArray_STRIDE(<numpy.ndarray>hashes, 0)
        batch.rows = <const uint8_t*>numpy.PyArray_DATA(<numpy.ndarray>hashes)
        return check_rows(batch, expected)
    if not PyObject_CheckBuffer(hashes):
        return join_hashes(hashes, expected, known_width)
    batch.kept = hashes
    PyObject_GetBuffer(hashes, &batch.view, PyBUF_STRIDED_RO | PyBUF_FORMAT)
    batch.has_view = True
    if batch.view.itemsize != 1:
        raise TypeError(
            f"hashes must be uint8, not elements of {batch.view.itemsize} bytes"
        )
    if batch.view.ndim == 2:
        batch.count = batch.view.shape[0]
        batch.row_bytes = batch.view.strides[0] if batch.count > 1 else batch.view.shape[1]
        if batch.count == 0:
            batch.width = known_width if known_width else 32
        else:
            check_width(batch.view.shape[1])
            batch.width = <uint32_t>batch.view.shape[1]
            if batch.view.strides[1] != 1 and batch.width > 1 or batch.view.strides[0] < 0:
                return read_hashes(np.ascontiguousarray(hashes), expected, known_width)
    elif batch.view.ndim == 1:
        length = batch.view.len
        if batch.view.strides != NULL and length > 1 and batch.view.strides[0] != 1:
            return read_hashes(np.ascontiguousarray(hashes), expected, known_width)
        if expected > 0 and length:
            if length % expected:
                raise ValueError(f"{length} bytes of hashes do not split into {expected} rows")
            check_width(length // expected)
            batch.width = <uint32_t>(length // expected)
        else:
            batch.width = known_width if known_width else 32
            if length % batch.width:
                raise ValueError(
                    f"{length} bytes of hashes are no multiple of the width {batch.width}"
                )
        batch.row_bytes = batch.width
        batch.count = length // batch.width
    else:
        raise TypeError(f"hashes must have one or two dimensions, not {batch.view.ndim}")
    batch.rows = <const uint8_t*>batch.view.buf
    return check_rows(batch, expected)


cdef inline bint is_row_array(numpy.ndarray hashes) noexcept:
    # The usual case; every other one has its own checks.
    return (
        numpy.PyArray_DIM(hashes, 0) > 0
        and 1 <= numpy.PyArray_DIM(hashes, 1) <= MAX_HASH_BYTES
        and numpy.PyArray_STRIDE(hashes, 1) == 1
        and numpy.PyArray_STRIDE(hashes, 0) >= numpy.PyArray_DIM(hashes, 1)
    )


cdef HashBatch check_rows(HashBatch batch, Py_ssize_t expected):
    if expected >= 0 and <Py_ssize_t>batch.count != expected:
        raise ValueError(f"{batch.count} hashes for {expected} blocks")
    return batch


cdef object boundaries_as_int64(object num_tokens):
    array = np.asarray(num_tokens)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"num_tokens must be integers, not {array.dtype}")
    if array.dtype == np.uint64 and array.size and array.max() > MAX_NUM_TOKENS:
        raise ContractError(f"num_tokens is {array.max()}; the limit is {<uint32_t>MAX_NUM_TOKENS}")
    return np.ascontiguousarray(array, dtype=np.int64)


cdef TokenBuffer read_boundaries(object num_tokens, size_t count, uint32_t hash_block_size):
    # `count` prefix lengths, each a multiple of `hash_block_size` above 0.
    cdef TokenBuffer ends = TokenBuffer.__new__(TokenBuffer, count)
    cdef const int64_t* values
    cdef size_t i
    array = num_tokens
    if not (
        is_array(array, numpy.NPY_INT64, 1)
        and numpy.PyArray_IS_C_CONTIGUOUS(<numpy.ndarray>array)
    ):
        array = boundaries_as_int64(num_tokens)
    if array.ndim != 1 or <size_t>len(array) != count:
        raise ContractError(f"num_tokens has shape {array.shape}; there are {count} blocks")
    values = <const int64_t*>numpy.PyArray_DATA(<numpy.ndarray>array)
    for i in range(count):
        if not 1 <= values[i] <= MAX_NUM_TOKENS or <uint32_t>values[i] % hash_block_size:
            raise ContractError(
                f"num_tokens is {values[i]} at position {i}; it must be a multiple of "
                f"hash_block_size {hash_block_size} from 1 to {<uint32_t>MAX_NUM_TOKENS}"
            )
        ends.values[i] = values[i]
    return ends


cdef object check_length(object items, size_t count, str what):
    # A list of `count` items, or None.
    if items is None:
        return None
    items = list(items)
    if <size_t>len(items) != count:
        raise ContractError(f"{len(items)} {what} for {count} blocks")
    return items


cdef int64_t read_count(object value, object what, int64_t low, int64_t high) except? -1:
    # An integer in [low, high], or an error that names it.
    cdef int overflow = 0
    cdef long long small
    if type(value) is int:
        small = PyLong_AsLongLongAndOverflow(value, &overflow)
        if not overflow and low <= small <= high:
            return small
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__"):
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}")
    number = value.__index__()
    if not low <= number <= high:
        raise ContractError(f"{what} is {number}; it must be from {low} to {high}")
    return number


cdef uint32_t read_group(object group) except? 0xFFFFFFFF:
    return <uint32_t>read_count(group, "kv_cache_group_id", 0, 0xFFFFFFFF)


cdef int read_key(object key, const uint8_t** digest, uint32_t* group) except -1:
    # A block hash with its group: digest, then four bytes big-endian. Returns the width.
    cdef const uint8_t* data
    cdef Py_ssize_t length
    if not isinstance(key, bytes):
        raise TypeError(f"a block hash must be bytes, not {type(key).__name__}")
    length = PyBytes_GET_SIZE(key)
    check_width(length - 4)
    data = <const uint8_t*>PyBytes_AS_STRING(key)
    digest[0] = data
    data += length - 4
    group[0] = (
        (<uint32_t>data[0] << 24) | (<uint32_t>data[1] << 16)
        | (<uint32_t>data[2] << 8) | data[3]
    )
    return <int>(length - 4)


cdef bytes make_key(const uint8_t* digest, uint32_t width, uint32_t group):
    cdef bytes key = PyBytes_FromStringAndSize(NULL, width + 4)
    cdef uint8_t* data = <uint8_t*>PyBytes_AS_STRING(key)
    memcpy(data, digest, width)
    data[width] = group >> 24
    data[width + 1] = (group >> 16) & 0xFF
    data[width + 2] = (group >> 8) & 0xFF
    data[width + 3] = group & 0xFF
    return key
