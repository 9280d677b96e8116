# SPDX-License-Identifier: Apache-2.0
# Extra keys as the bytes they take in a block, for what engines put there: tuples of short
# strings and bytes, ints, booleans and None. For anything else the functions return NULL, and
# the serializer's own library has to write it.

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from cpool.hashing cimport encode

cdef extern from "Python.h":
    # On borrowed references; none of these runs Python code.
    bint PyLong_CheckExact(PyObject* value) noexcept
    bint PyUnicode_CheckExact(PyObject* value) noexcept
    bint PyBytes_CheckExact(PyObject* value) noexcept
    bint PyTuple_CheckExact(PyObject* value) noexcept
    PyObject* PyTuple_GET_ITEM(PyObject* items, Py_ssize_t index) noexcept
    Py_ssize_t PyTuple_GET_SIZE(PyObject* items) noexcept
    char* PyBytes_AS_STRING(PyObject* value) noexcept
    Py_ssize_t PyBytes_GET_SIZE(PyObject* value) noexcept
    const char* PyUnicode_AsUTF8AndSize(PyObject* value, Py_ssize_t* num_bytes) noexcept
    long long PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow) noexcept
    void PyErr_Clear() noexcept
    PyObject* Py_None
    PyObject* Py_True
    PyObject* Py_False

cdef enum:
    MAX_KEYS_BYTES = 2048
    MAX_ITEM_BYTES = 255  # longer strings have other opcodes in a pickle
    MAX_DEPTH = 8
    MAX_MEMO = 64

cdef struct Memo:
    # What the pickler has memoized: an object that comes again, the very same one and not
    # only an equal one, is written as its number here.
    PyObject* entries[MAX_MEMO]
    int num_entries


cdef inline int check_num_keys(object extra_keys, Py_ssize_t num_blocks) except -1:
    """Refuse a sequence of extra keys with another number of entries than blocks."""
    if extra_keys is None or callable(extra_keys) or len(extra_keys) == num_blocks:
        return 0
    raise ValueError(f"extra_keys has {len(extra_keys)} entries for {num_blocks} blocks")


cdef struct Text:
    const char* data  # NULL: not a string or bytes that we write
    Py_ssize_t num_bytes


cdef inline Text text_of(PyObject* value) noexcept:
    cdef Text text
    text.data = NULL
    text.num_bytes = 0
    if PyUnicode_CheckExact(value):
        text.data = PyUnicode_AsUTF8AndSize(value, &text.num_bytes)
        if text.data == NULL:  # a lone surrogate
            PyErr_Clear()
    elif PyBytes_CheckExact(value):
        text.data = PyBytes_AS_STRING(value)
        text.num_bytes = PyBytes_GET_SIZE(value)
    if text.num_bytes > MAX_ITEM_BYTES:
        text.data = NULL
    return text


cdef inline unsigned char* memoize(unsigned char* p, PyObject* value, Memo* memo) noexcept:
    if p == NULL or memo.num_entries == MAX_MEMO:
        return NULL
    memo.entries[memo.num_entries] = value
    memo.num_entries += 1
    p[0] = 0x94
    return p + 1


cdef inline unsigned char* put_pickle(
    unsigned char* p, const unsigned char* end, PyObject* value, Memo* memo, int depth
) noexcept:
    """Write `value` as the pickler would after what is in `memo`; nothing beyond `end`."""
    cdef int overflow = 0
    cdef int64_t number
    cdef Py_ssize_t i, num_items
    cdef Text text
    if end - p < MAX_ITEM_BYTES + 16 or depth > MAX_DEPTH:
        return NULL
    if value == Py_None or value == Py_True or value == Py_False:
        p[0] = 78 if value == Py_None else (0x88 if value == Py_True else 0x89)
        return p + 1
    if PyLong_CheckExact(value):
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        return NULL if overflow else encode.put_pickle_int(p, number)
    for i in range(memo.num_entries):
        if memo.entries[i] == value:
            p[0] = 104  # BINGET
            p[1] = <unsigned char> i
            return p + 2
    if PyTuple_CheckExact(value):
        num_items = PyTuple_GET_SIZE(value)
        if num_items == 0:
            p[0] = 41  # EMPTY_TUPLE, which is never memoized
            return p + 1
        if num_items > 3:
            p[0] = 40  # MARK
            p += 1
        for i in range(num_items):
            p = put_pickle(p, end, PyTuple_GET_ITEM(value, i), memo, depth + 1)
            if p == NULL:
                return NULL
        p[0] = 116 if num_items > 3 else <unsigned char> (0x84 + num_items)
        return memoize(p + 1, value, memo)
    text = text_of(value)
    if text.data == NULL:
        return NULL
    p[0] = 0x8C if PyUnicode_CheckExact(value) else 67  # SHORT_BINUNICODE, SHORT_BINBYTES
    p[1] = <unsigned char> text.num_bytes
    memcpy(p + 2, text.data, text.num_bytes)
    return memoize(p + 2 + text.num_bytes, value, memo)


cdef inline unsigned char* put_cbor(
    unsigned char* p, const unsigned char* end, PyObject* value, int depth
) noexcept:
    """Write `value` in canonical CBOR; nothing beyond `end`."""
    cdef int overflow = 0
    cdef int64_t number
    cdef Py_ssize_t i, num_items
    cdef Text text
    if end - p < MAX_ITEM_BYTES + 16 or depth > MAX_DEPTH:
        return NULL
    if value == Py_None or value == Py_True or value == Py_False:
        p[0] = 0xF6 if value == Py_None else (0xF5 if value == Py_True else 0xF4)
        return p + 1
    if PyLong_CheckExact(value):
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        return NULL if overflow else encode.put_cbor_int(p, number)
    if PyTuple_CheckExact(value):
        num_items = PyTuple_GET_SIZE(value)
        p = encode.put_cbor_head(p, 0x80, <uint64_t> num_items)
        for i in range(num_items):
            p = put_cbor(p, end, PyTuple_GET_ITEM(value, i), depth + 1)
            if p == NULL:
                return NULL
        return p
    text = text_of(value)
    if text.data == NULL:
        return NULL
    p = encode.put_cbor_head(
        p, 0x60 if PyUnicode_CheckExact(value) else 0x40, <uint64_t> text.num_bytes
    )
    memcpy(p, text.data, text.num_bytes)
    return p + text.num_bytes
