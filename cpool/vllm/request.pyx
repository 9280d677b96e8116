# SPDX-License-Identifier: Apache-2.0
"""What vLLM's Request does for each decoded token, without Python code in between.

Most tokens complete no block, so what is left of a step is to append to two lists and to
compare two lengths. Knows vLLM's names, and imports nothing of it.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject

from cpool.hashing cimport token_source
from cpool.hashing.chain cimport BlockHasher
from cpool.hashing.token_source cimport Tokens

cdef extern from "Python.h":
    ctypedef struct PyMethodDef:
        const char* ml_name
        void* ml_meth
        int ml_flags
        const char* ml_doc
    int METH_FASTCALL
    int METH_KEYWORDS
    object PyDescr_NewMethod(type cls, PyMethodDef* definition)
    bint PyLong_Check(PyObject* value) noexcept
    bint PyList_CheckExact(PyObject* value) noexcept
    Py_ssize_t PyList_GET_SIZE(PyObject* items) noexcept
    int PyList_Append(PyObject* items, PyObject* value) except -1
    object PyObject_GenericGetDict(object owner, void* context)
    # Borrowed references.
    PyObject* PyDict_GetItemWithError(object items, object key) except? NULL
    PyObject* Py_None


cdef inline PyObject* find_list(object attributes, object name) except? NULL:
    """Returns the list of that name, borrowed; NULL if there is none."""
    cdef PyObject* value = PyDict_GetItemWithError(attributes, name)
    return value if value != NULL and PyList_CheckExact(value) else NULL


@cython.final
cdef class RequestHasher:
    """A function of a request that hashes the blocks it has completed since the last call.

    Args:
        hasher: makes the hashes.
        extra_keys: a function of a request and its first token to be hashed that returns
            the ``extra_keys`` for ``BlockHasher.new_hashes``; None for a request without
            adapter, multimodal features, salt and prompt embeddings.
    """

    cdef readonly BlockHasher hasher
    cdef readonly object extra_keys

    def __cinit__(self, BlockHasher hasher not None, extra_keys):
        self.hasher = hasher
        self.extra_keys = extra_keys

    def __call__(self, request):
        """Returns the new hashes as a list of bytes."""
        cdef object token_ids = request._all_token_ids
        cdef object block_hashes = request.block_hashes
        cdef Py_ssize_t start = len(block_hashes) * self.hasher.hash_block_size
        if len(token_ids) < start + self.hasher.hash_block_size:
            return []
        return self.hasher.new_hashes(token_ids, block_hashes, self.extra_keys(request, start))

    cdef int extend(
        self, request, object attributes, list token_ids, list block_hashes
    ) except -1:
        """Does ``block_hashes.extend(self(request))`` when a block is complete."""
        cdef BlockHasher hasher = self.hasher
        cdef Py_ssize_t num_hashed = len(block_hashes)
        cdef Py_ssize_t start = num_hashed * hasher.hash_block_size
        cdef Tokens tokens
        cdef bytes parent, block_hash
        if (
            len(token_ids) < start + 2 * hasher.hash_block_size
            and has_no_extra_keys(attributes, start)
        ):
            parent = hasher.root
            if num_hashed:
                parent = hasher.checked_parent(block_hashes[num_hashed - 1])
            block_hash = PyBytes_FromStringAndSize(NULL, hasher.hash_width)
            token_source.open(&tokens, token_ids)
            if hasher.hash_natively(
                &tokens,
                start,
                <const unsigned char*> PyBytes_AS_STRING(parent),
                hasher.no_keys,
                <unsigned char*> PyBytes_AS_STRING(block_hash),
            ):
                block_hashes.append(block_hash)
                return 0
        block_hashes.extend(self(request))
        return 0


cdef bint has_no_extra_keys(object attributes, Py_ssize_t first_token) except -1:
    """Whether it is plain that no block from ``first_token`` on has extra keys."""
    cdef PyObject* features = find_list(attributes, "mm_features")
    return (
        features != NULL
        and PyList_GET_SIZE(features) == 0
        and PyDict_GetItemWithError(attributes, "lora_request") == Py_None
        and (first_token > 0 or PyDict_GetItemWithError(attributes, "cache_salt") == Py_None)
        and PyDict_GetItemWithError(attributes, "prompt_embeds") == Py_None
    )


# A process has one vLLM.
cdef object request_class = None
cdef object stock_append = None
cdef PyMethodDef definition


def append_method(type cls, stock):
    """Returns what to put in the place of ``Request.append_output_token_ids``.

    It is a method as built-in types have them, which the interpreter calls faster than any
    other function.

    Args:
        cls: vLLM's Request. For an instance of a subclass the stock method is called.
        stock: its method, also called for what isn't a single token.
    """
    global request_class, stock_append
    request_class, stock_append = cls, stock
    definition.ml_name = "append_output_token_ids"
    definition.ml_meth = <void*> append_output_token_ids
    definition.ml_flags = METH_FASTCALL | METH_KEYWORDS
    definition.ml_doc = "Append output tokens, and the hashes of the blocks that they complete."
    return PyDescr_NewMethod(cls, &definition)


cdef object append_output_token_ids(
    object self, PyObject** arguments, Py_ssize_t num_positional, PyObject* keywords
):
    cdef object attributes
    cdef PyObject* token
    cdef PyObject* output_ids
    cdef PyObject* all_ids
    cdef PyObject* block_hashes
    cdef PyObject* hasher
    if type(self) is request_class and num_positional == 1 and keywords == NULL:
        token = arguments[0]
        attributes = PyObject_GenericGetDict(self, NULL)
        output_ids = find_list(attributes, "_output_token_ids")
        all_ids = find_list(attributes, "_all_token_ids")
        block_hashes = find_list(attributes, "block_hashes")
        hasher = PyDict_GetItemWithError(attributes, "_block_hasher")
        if (
            PyLong_Check(token)
            and output_ids != NULL
            and all_ids != NULL
            and block_hashes != NULL
            and hasher != NULL
            and type(<object> hasher) is RequestHasher
        ):
            PyList_Append(output_ids, token)
            PyList_Append(all_ids, token)
            if PyList_GET_SIZE(all_ids) >= (
                (PyList_GET_SIZE(block_hashes) + 1)
                * (<RequestHasher> hasher).hasher.hash_block_size
            ):
                (<RequestHasher> hasher).extend(
                    self, attributes, <list> all_ids, <list> block_hashes
                )
            return None
    return call_stock(self, arguments, num_positional, keywords)


cdef object call_stock(
    object self, PyObject** arguments, Py_ssize_t num_positional, PyObject* keywords
):
    cdef Py_ssize_t i
    cdef list positional = [<object> arguments[i] for i in range(num_positional)]
    cdef dict named = {}
    if keywords != NULL:
        for i, name in enumerate(<tuple> <object> keywords):
            named[name] = <object> arguments[num_positional + i]
    return stock_append(self, *positional, **named)
