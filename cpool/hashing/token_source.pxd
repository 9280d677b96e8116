# SPDX-License-Identifier: Apache-2.0
# Token ids in whatever a caller holds them: a list, a tuple, or a one-dimensional buffer of
# integers. `load` reads a block of them as int64, or says that they do not fit; `objects`
# gives the same block as Python objects for the serializer to judge.

from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDED_RO, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
)
from cpython.number cimport PyIndex_Check, PyNumber_Index
from cpython.object cimport PyObject
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    """
    /* Ints of at most one digit (30 bits), which is nearly every token, without a call.
       Returns 0 for a longer one. `value` must be an exact int. */
    static inline int cpool_read_short_int(PyObject *value, int64_t *out) {
    #if PY_VERSION_HEX >= 0x030C0000
        if (!PyUnstable_Long_IsCompact((PyLongObject *)value)) return 0;
        *out = PyUnstable_Long_CompactValue((PyLongObject *)value);
    #else
        Py_ssize_t num_digits = Py_SIZE(value); /* negative for a negative int */
        if (num_digits < -1 || num_digits > 1) return 0;
        *out = num_digits * (int64_t)((PyLongObject *)value)->ob_digit[0];
    #endif
        return 1;
    }
    """
    bint read_short_int "cpool_read_short_int"(PyObject* value, int64_t* out) noexcept

cdef extern from "Python.h":
    int PY_LITTLE_ENDIAN
    int PyLong_CheckExact(PyObject* value) noexcept
    int PyList_CheckExact(object value) noexcept
    int PyTuple_CheckExact(object value) noexcept
    # Borrowed references.
    PyObject* PyList_GET_ITEM(PyObject* items, Py_ssize_t index) noexcept
    PyObject* PyTuple_GET_ITEM(PyObject* items, Py_ssize_t index) noexcept
    Py_ssize_t PyList_GET_SIZE(PyObject* items) noexcept
    # No error is set for an int that is too large, only `overflow`.
    long long PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow) noexcept

cdef enum Kind:
    LIST
    TUPLE
    BUFFER

cdef struct Tokens:
    Kind kind
    PyObject* items  # LIST, TUPLE: borrowed; whoever calls `open` keeps it alive
    Py_buffer view  # BUFFER only
    bint is_signed  # BUFFER only
    Py_ssize_t num_tokens


cdef inline int open_buffer(Tokens* tokens, object token_ids) except -1:
    cdef bytes code
    PyObject_GetBuffer(token_ids, &tokens.view, PyBUF_STRIDED_RO | PyBUF_FORMAT)
    code = tokens.view.format if tokens.view.format != NULL else b"B"
    if code[:1] in (b"@", b"=", b"<" if PY_LITTLE_ENDIAN else b">"):
        code = code[1:]
    if (
        tokens.view.ndim != 1
        or len(code) != 1
        or code not in b"bhilqnBHILQN"
        or tokens.view.itemsize not in (1, 2, 4, 8)
    ):
        message = (
            f"token_ids is a buffer of {tokens.view.ndim} dimensions and format "
            f"{(tokens.view.format or b'B').decode()!r}, not one dimension of native integers"
        )
        PyBuffer_Release(&tokens.view)
        raise TypeError(message)
    tokens.kind = BUFFER
    tokens.is_signed = code in b"bhilqn"
    tokens.num_tokens = tokens.view.shape[0]
    return 0


cdef inline object integer(object value, str what):
    if isinstance(value, (bool, float)) or not PyIndex_Check(value):
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}")
    return PyNumber_Index(value)


cdef inline bint is_readable(object token_ids) noexcept:
    """Whether `open` takes this, and not only a list made of it."""
    return (
        PyList_CheckExact(token_ids)
        or PyTuple_CheckExact(token_ids)
        or PyObject_CheckBuffer(token_ids)
    )


cdef inline int open(Tokens* tokens, object token_ids) except -1:
    """Fill `tokens`; a list or tuple must outlive it. `close` it afterwards."""
    if PyList_CheckExact(token_ids):
        tokens.kind = LIST
        tokens.items = <PyObject*> token_ids
        tokens.num_tokens = len(<list> token_ids)
    elif PyTuple_CheckExact(token_ids):
        tokens.kind = TUPLE
        tokens.items = <PyObject*> token_ids
        tokens.num_tokens = len(<tuple> token_ids)
    else:
        open_buffer(tokens, token_ids)
    return 0


cdef inline void close(Tokens* tokens) noexcept:
    if tokens.kind == BUFFER:
        PyBuffer_Release(&tokens.view)


cdef inline bint is_shrunk(const Tokens* tokens) noexcept:
    """Whether Python code that ran since `open` took tokens out of the list."""
    return tokens.kind == LIST and PyList_GET_SIZE(tokens.items) < tokens.num_tokens


cdef inline bint read_buffer(const Tokens* tokens, Py_ssize_t index, int64_t* value) noexcept:
    """Read one element; false if it is 2**63 or more, `value` then holds its low 64 bits."""
    cdef const char* p = <const char*> tokens.view.buf + index * tokens.view.strides[0]
    cdef int8_t s8
    cdef int16_t s16
    cdef int32_t s32
    if tokens.view.itemsize == 8:
        memcpy(value, p, 8)
        return tokens.is_signed or value[0] >= 0
    if tokens.view.itemsize == 4:
        memcpy(&s32, p, 4)
        value[0] = s32 if tokens.is_signed else <int64_t> <uint32_t> s32
    elif tokens.view.itemsize == 2:
        memcpy(&s16, p, 2)
        value[0] = s16 if tokens.is_signed else <int64_t> <uint16_t> s16
    else:
        memcpy(&s8, p, 1)
        value[0] = s8 if tokens.is_signed else <int64_t> <uint8_t> s8
    return True


cdef inline bint load(
    const Tokens* tokens, Py_ssize_t first, Py_ssize_t num_tokens, int64_t* values
) noexcept:
    """Copy a block to `values`; false if one is not a plain int within int64."""
    cdef PyObject* item
    cdef int overflow = 0
    cdef Py_ssize_t i
    if tokens.kind == BUFFER:
        for i in range(num_tokens):
            if not read_buffer(tokens, first + i, &values[i]):
                return False
        return True
    for i in range(num_tokens):
        if tokens.kind == LIST:
            item = PyList_GET_ITEM(tokens.items, first + i)
        else:
            item = PyTuple_GET_ITEM(tokens.items, first + i)
        if not PyLong_CheckExact(item):
            return False
        if not read_short_int(item, &values[i]):
            values[i] = PyLong_AsLongLongAndOverflow(item, &overflow)
            if overflow != 0:
                return False
    return True


cdef inline tuple objects(const Tokens* tokens, Py_ssize_t first, Py_ssize_t num_tokens):
    """A block as Python objects: the caller's own, or plain ints out of a buffer."""
    cdef int64_t value
    cdef list out
    cdef Py_ssize_t i
    if tokens.kind == LIST:
        return tuple((<list> <object> tokens.items)[first:first + num_tokens])
    if tokens.kind == TUPLE:
        return (<tuple> <object> tokens.items)[first:first + num_tokens]
    out = []
    for i in range(num_tokens):
        if read_buffer(tokens, first + i, &value):
            out.append(value)
        else:
            out.append(<uint64_t> value)
    return tuple(out)
