# SPDX-License-Identifier: Apache-2.0
cimport cython

from cpool.hashing.token_source cimport Tokens


@cython.final
cdef class BlockHasher:
    cdef readonly Py_ssize_t hash_block_size  # tokens
    cdef readonly str algorithm
    cdef readonly Py_ssize_t hash_width  # bytes a hash
    cdef readonly bytes root  # the parent of the first block
    cdef bint _is_cbor
    cdef bint _is_xxh
    cdef bytes no_keys  # what a block without extra keys ends with
    cdef public bint _native_digest  # use the C functions of libcrypto or xxhash
    cdef public bint _native_encoding  # write pickle and CBOR bytes here
    cdef unsigned char* _message  # one encoded block; holds nothing between blocks
    cdef Py_ssize_t _message_bytes
    cdef long long* _values  # one block's tokens; holds nothing between blocks

    cdef checked_parent(self, parent)
    cdef int check_token(self, object token, Py_ssize_t position) except -1
    cdef bytes hash_run(
        self,
        const Tokens* tokens,
        Py_ssize_t first,
        Py_ssize_t num_blocks,
        bytes parent,
        object extra_keys,
        Py_ssize_t position,
    )
    cdef int hash_natively(
        self,
        const Tokens* tokens,
        Py_ssize_t first,
        const unsigned char* parent,
        bytes tail,
        unsigned char* out,
    ) except -1
    cdef int hash_message(
        self, const unsigned char* parent, bytes tail, unsigned char* out
    ) except -1
    cdef int grow_message(self, Py_ssize_t num_bytes) except -1
    cdef int digest_in_python(self, bytes message, unsigned char* out) except -1
    cdef int hash_slowly(
        self,
        const Tokens* tokens,
        Py_ssize_t first,
        bytes parent,
        object extra_keys,
        Py_ssize_t position,
        unsigned char* out,
    ) except -1
    cdef object keys_error(self, object extra_keys, Py_ssize_t position, object error)
    cdef bytes tail_of(self, object extra_keys, bytes parent, Py_ssize_t position)
    cdef bytes tail_by_library(self, object extra_keys, bytes parent, Py_ssize_t position)
