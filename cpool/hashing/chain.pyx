# SPDX-License-Identifier: Apache-2.0
"""One chained hash per block of tokens, the same bytes as vLLM's `hash_block_tokens`.

A block's hash is the digest of the serialized `(parent, (token, ...), extra_keys)`. Blocks of
plain ints below 2**63, with extra keys of the usual kinds, are serialized in C; anything else
goes through `pickle` or `cbor2` themselves, so that speed never changes a result.

A pickle depends on which objects are one: a string that occurs twice in the extra keys is
written once if both are the same object, and twice if they are only equal. vLLM's `sha256`
and `xxhash` therefore hash ("lora", name, path) otherwise when `path is name` than when
`path == name`. We write what the pickler would for the very objects that were given, so we
agree with vLLM wherever it is given the same objects; the `*_cbor` algorithms have no such trap.
"""

import hashlib
import os
import pickle

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from cpython.number cimport PyIndex_Check
from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from cpool.hashing cimport digest, encode, keys, token_source
from cpool.hashing.token_source cimport Tokens

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
DEFAULT_SEED = "vllm-none-hash"

cdef enum:
    MAX_HASH_BLOCK_SIZE = 1 << 24

cdef digest.Library library
cdef object xxhash = None  # the module, from the first hasher that needs it
cdef str process_seed = os.urandom(32).hex()  # secret: see `default_root`
# After a block's extra keys: TUPLE3, MEMOIZE, STOP. Without any: None before it, CBOR's null.
cdef bytes PICKLE_END = b"\x87\x94."
cdef bytes PICKLE_NO_KEYS = b"N" + PICKLE_END
cdef bytes CBOR_NO_KEYS = b"\xf6"


cdef object shared_object(object module):
    """The file a module was loaded from; None if it is part of the interpreter."""
    filename = getattr(module, "__file__", None)
    return None if filename is None else os.fsencode(filename)


cdef int load_sha256() except -1:
    """Find libcrypto, and keep it only if it agrees with hashlib."""
    cdef unsigned char out[32]
    cdef char* filename = NULL
    cdef bytes message = bytes(range(200))
    try:
        import _hashlib
    except ImportError:  # an interpreter without OpenSSL
        return 0
    name = shared_object(_hashlib)
    if name is not None:
        filename = <bytes> name
    digest.find_sha256(&library, filename)
    if library.sha256_init == NULL:  # linked into the interpreter, its symbols hidden
        digest.find_sha256(&library, b"libcrypto.so.3")
    if library.sha256_init != NULL:
        digest.sha256(&library, <const unsigned char*> message, 200, out)
        if out[:32] != hashlib.sha256(message).digest():
            library.sha256_init = NULL
    return 0


cdef int load_xxhash() except -1:
    """Import xxhash; find its C function, and keep it only if it agrees with Python's."""
    global xxhash
    cdef unsigned char out[16]
    cdef bytes message = bytes(range(250)) * 2  # XXH3 has other code above 16, 128, 240 bytes
    if xxhash is not None:
        return 0
    try:
        import xxhash as module
        from xxhash import _xxhash
    except ImportError as error:
        raise ModuleNotFoundError(
            "the xxhash algorithms need the xxhash package: pip install 'cpool[hashing]'"
        ) from error
    name = shared_object(_xxhash)
    if name is not None:
        digest.find_xxh3_128(&library, <const char*> <bytes> name)
    if library.xxh3_128bits != NULL:
        for size in (0, 3, 16, 100, 128, 200, 240, 300, 500):
            digest.xxh3_128(&library, <const unsigned char*> message, size, out)
            if out[:16] != module.xxh3_128_digest(message[:size]):
                library.xxh3_128bits = NULL
                break
    xxhash = module
    return 0


cdef bytes serialize(object value, bint is_cbor):
    """Serialize as vLLM does."""
    if not is_cbor:
        return pickle.dumps(value, protocol=5)
    try:
        import cbor2
    except ImportError as error:
        raise ModuleNotFoundError(
            "extra keys and odd tokens need the cbor2 package for a *_cbor algorithm: "
            "pip install 'cpool[hashing]'"
        ) from error
    return cbor2.dumps(value, canonical=True)


cdef int check_algorithm(object algorithm) except -1:
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm is {algorithm!r}, not one of {', '.join(ALGORITHMS)}")
    return 0


def default_root(algorithm):
    """Return the hash that stands before the first block, as vLLM 0.32 derives it.

    It is the digest of a serialized seed: the environment's `PYTHONHASHSEED` if that is set,
    else a fixed one for SHA-256 and, for xxhash, one drawn at random in each process, because
    who knows the seed of a hash that is not collision resistant can prepare collisions.
    """
    check_algorithm(algorithm)
    is_cbor, is_xxh = algorithm.endswith("_cbor"), algorithm.startswith("xxhash")
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        seed = process_seed if is_xxh else DEFAULT_SEED
    if is_cbor:
        message = cbor_string(seed)
    else:
        message = serialize(seed, False)
    if is_xxh:
        load_xxhash()
        return xxhash.xxh3_128_digest(message)
    return hashlib.sha256(message).digest()


cdef bytes cbor_string(str text):
    cdef unsigned char head[16]
    cdef bytes data = text.encode()
    cdef unsigned char* end = encode.put_cbor_head(head, 0x60, len(data))
    return head[:end - head] + data


@cython.final
cdef class BlockHasher:
    """Makes the chained hashes of token sequences, for one algorithm and block size.

    A hasher holds no sequence: one serves any number of them.

    Args:
        hash_block_size: Tokens per hash, at least 1.
        algorithm: "sha256", "sha256_cbor" (32-byte hashes), "xxhash" or "xxhash_cbor" (16
            bytes; they need the xxhash package).
        root: The parent of a sequence's first block, `hash_width` bytes; `default_root`
            of the algorithm if None.

    Raises:
        ValueError: Unknown algorithm, block size out of range, root of another width.
        ModuleNotFoundError: The algorithm needs a package that is missing.
    """

    def __cinit__(self, hash_block_size, algorithm="sha256", *, root=None):
        check_algorithm(algorithm)
        hash_block_size = token_source.integer(hash_block_size, "hash_block_size")
        if not 1 <= hash_block_size <= MAX_HASH_BLOCK_SIZE:
            raise ValueError(
                f"hash_block_size is {hash_block_size}, not within 1 and {MAX_HASH_BLOCK_SIZE}"
            )
        self.hash_block_size = hash_block_size
        self.algorithm = algorithm
        self._is_cbor = algorithm.endswith("_cbor")
        self._is_xxh = algorithm.startswith("xxhash")
        self.hash_width = 16 if self._is_xxh else 32
        if self._is_xxh:
            load_xxhash()
        self.root = self.checked_parent(default_root(algorithm) if root is None else root)
        self.no_keys = CBOR_NO_KEYS if self._is_cbor else PICKLE_NO_KEYS
        self._native_encoding = self._is_cbor or PICKLE_IS_KNOWN
        self._native_digest = (
            library.xxh3_128bits != NULL if self._is_xxh else library.sha256_init != NULL
        )
        self._values = <long long*> PyMem_RawMalloc(self.hash_block_size * sizeof(long long))
        self._message_bytes = (
            encode.MAX_HEADER_BYTES + self.hash_width
            + encode.MAX_TOKEN_BYTES * (self.hash_block_size + 1) + 64
        )
        self._message = <unsigned char*> PyMem_RawMalloc(self._message_bytes)
        if self._values == NULL or self._message == NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_RawFree(self._values)
        PyMem_RawFree(self._message)

    def __repr__(self):
        return f"BlockHasher({self.hash_block_size}, {self.algorithm!r})"

    def __reduce__(self):
        return _make_hasher, (self.hash_block_size, self.algorithm, self.root)

    @property
    def digest_source(self):
        """Where digests come from: "libcrypto", "hashlib", "XXH3_128bits" or "xxhash"."""
        if self._is_xxh:
            return "XXH3_128bits" if self._native_digest else "xxhash"
        return "libcrypto" if self._native_digest else "hashlib"

    def new_hashes(self, token_ids, block_hashes, extra_keys=None):
        """Hash the blocks that a growing sequence has completed since it was last hashed.

        Args:
            token_ids: All tokens of the sequence so far: a list, any sequence whose slices
                hold ints, or a one-dimensional buffer of integers.
            block_hashes: The hashes it has so far, a sequence of bytes. Only its length and
                last entry are read.
            extra_keys: None, one entry (a tuple or None) per new block, or a function that
                is called once per new block, in order, with its first token's index and
                the index after its last.

        Returns:
            A list of one bytes object of `hash_width` bytes per new block.

        Raises:
            TypeError: A token or an extra key cannot be hashed; the message names the place.
            ValueError: The last hash is not `hash_width` bytes, or the number of extra
                keys is not that of the new blocks.
        """
        cdef Py_ssize_t size = self.hash_block_size
        cdef Py_ssize_t num_hashed = len(block_hashes)
        cdef Py_ssize_t start = num_hashed * size
        cdef Py_ssize_t num_blocks = len(token_ids) // size - num_hashed
        cdef Py_ssize_t first = start
        cdef Py_ssize_t width = self.hash_width
        cdef Tokens tokens
        cdef const char* rows
        if num_blocks <= 0:
            return []
        parent = self.root if num_hashed == 0 else self.checked_parent(block_hashes[num_hashed - 1])
        if not token_source.is_readable(token_ids):
            token_ids = list(token_ids[start:start + num_blocks * size])
            first = 0
        token_source.open(&tokens, token_ids)
        try:
            hashes = self.hash_run(&tokens, first, num_blocks, parent, extra_keys, start)
        finally:
            token_source.close(&tokens)
        rows = PyBytes_AS_STRING(hashes)
        return [PyBytes_FromStringAndSize(rows + i * width, width) for i in range(num_blocks)]

    cdef checked_parent(self, parent):
        if type(parent) is not bytes:
            raise TypeError(f"a parent hash must be bytes, not {type(parent).__name__}")
        if PyBytes_GET_SIZE(parent) != self.hash_width:
            raise ValueError(
                f"a parent hash of {self.algorithm} has {self.hash_width} bytes, "
                f"not {PyBytes_GET_SIZE(parent)}"
            )
        return parent

    cdef int check_token(self, object token, Py_ssize_t position) except -1:
        """Refuse a token that no block can hold; `position` is its index in the sequence."""
        if type(token) is int:
            return 0
        if not PyIndex_Check(token):
            raise TypeError(f"token {position} is not an integer but {token!r}")
        try:
            serialize(token, self._is_cbor)
        except (ModuleNotFoundError, MemoryError):
            raise
        except Exception as error:
            raise TypeError(f"token {position}, {token!r}, has no encoding: {error}") from error
        return 0

    cdef bytes hash_run(
        self,
        const Tokens* tokens,
        Py_ssize_t first,
        Py_ssize_t num_blocks,
        bytes parent,
        object extra_keys,
        Py_ssize_t position,
    ):
        """Return the hashes of `num_blocks` blocks, one behind the other.

        `first` is where they begin in `tokens`, `position` where they begin in the sequence.
        Nothing of the hasher's own is written but its scratch, so a failure leaves no trace.
        """
        cdef Py_ssize_t size = self.hash_block_size
        cdef Py_ssize_t width = self.hash_width
        cdef bytes out, tail
        cdef unsigned char* row
        cdef const unsigned char* parent_row
        cdef object block_keys = None
        cdef bint has_keys = extra_keys is not None
        cdef bint is_function = has_keys and callable(extra_keys)
        keys.check_num_keys(extra_keys, num_blocks)
        out = PyBytes_FromStringAndSize(NULL, num_blocks * width)
        row = <unsigned char*> PyBytes_AS_STRING(out)
        parent_row = <const unsigned char*> PyBytes_AS_STRING(parent)
        for i in range(num_blocks):
            tail = self.no_keys
            if has_keys:
                if is_function:
                    block_keys = extra_keys(position, position + size)
                else:
                    block_keys = extra_keys[i]
                if token_source.is_shrunk(tokens):
                    raise ValueError("token_ids has lost tokens while it was hashed")
                if block_keys is not None:
                    if i > 0:
                        parent = parent_row[:width]
                    tail = self.tail_of(block_keys, parent, position)
            if tail is None or not self.hash_natively(tokens, first, parent_row, tail, row):
                if i > 0:
                    parent = parent_row[:width]
                self.hash_slowly(tokens, first, parent, block_keys, position, row)
                if token_source.is_shrunk(tokens):
                    raise ValueError("token_ids has lost tokens while it was hashed")
            parent_row = row
            row += width
            first += size
            position += size
        return out

    cdef int hash_natively(
        self,
        const Tokens* tokens,
        Py_ssize_t first,
        const unsigned char* parent,
        bytes tail,
        unsigned char* out,
    ) except -1:
        """Hash the block that begins at `first`; 0 if the serializer has to write it.

        Runs no code of the caller's.
        """
        if not (
            self._native_encoding
            and token_source.load(tokens, first, self.hash_block_size, <int64_t*> self._values)
        ):
            return 0
        return self.hash_message(parent, tail, out)

    cdef int hash_message(
        self, const unsigned char* parent, bytes tail, unsigned char* out
    ) except -1:
        """Hash the block in `_values`; 0 if its pickle would take more than one frame."""
        cdef Py_ssize_t tail_bytes = PyBytes_GET_SIZE(tail)
        cdef unsigned char* p
        cdef Py_ssize_t num_bytes
        if self._is_cbor:
            p = encode.put_cbor_block(
                self._message, parent, self.hash_width,
                <const int64_t*> self._values, self.hash_block_size,
            )
        else:
            p = encode.put_pickle_block(
                self._message, parent, self.hash_width,
                <const int64_t*> self._values, self.hash_block_size,
            )
        num_bytes = p - self._message
        if num_bytes + tail_bytes > self._message_bytes:
            self.grow_message(num_bytes + tail_bytes)
        memcpy(self._message + num_bytes, PyBytes_AS_STRING(tail), tail_bytes)
        num_bytes += tail_bytes
        if not self._is_cbor:
            if num_bytes - encode.FRAME_HEADER_BYTES >= encode.FRAME_BYTES_LIMIT:
                return 0
            encode.close_pickle_frame(self._message, num_bytes)
        if not self._native_digest:
            self.digest_in_python(self._message[:num_bytes], out)
        elif self._is_xxh:
            digest.xxh3_128(&library, self._message, num_bytes, out)
        else:
            digest.sha256(&library, self._message, num_bytes, out)
        return 1

    cdef int grow_message(self, Py_ssize_t num_bytes) except -1:
        cdef unsigned char* fresh = <unsigned char*> PyMem_RawRealloc(self._message, num_bytes)
        if fresh == NULL:
            raise MemoryError
        self._message = fresh
        self._message_bytes = num_bytes
        return 0

    cdef int digest_in_python(self, bytes message, unsigned char* out) except -1:
        cdef bytes value
        if self._is_xxh:
            value = xxhash.xxh3_128_digest(message)
        else:
            value = hashlib.sha256(message).digest()
        memcpy(out, PyBytes_AS_STRING(value), self.hash_width)
        return 0

    cdef int hash_slowly(
        self,
        const Tokens* tokens,
        Py_ssize_t first,
        bytes parent,
        object extra_keys,
        Py_ssize_t position,
        unsigned char* out,
    ) except -1:
        """Hash one block through the serializer and the digest's Python function."""
        cdef tuple block = token_source.objects(tokens, first, self.hash_block_size)
        for i, token in enumerate(block):
            if not PyIndex_Check(token):
                raise TypeError(f"token {position + i} is not an integer but {token!r}")
        try:
            message = serialize((parent, block, extra_keys), self._is_cbor)
        except (ModuleNotFoundError, MemoryError):
            raise
        except Exception as error:
            for i, token in enumerate(block):
                self.check_token(token, position + i)
            raise self.keys_error(extra_keys, position, error) from error
        self.digest_in_python(message, out)
        return 0

    cdef object keys_error(self, object extra_keys, Py_ssize_t position, object error):
        return TypeError(
            f"extra keys of block {position // self.hash_block_size} (tokens {position} to "
            f"{position + self.hash_block_size - 1}), {extra_keys!r}, have no encoding: {error}"
        )

    cdef bytes tail_of(self, object extra_keys, bytes parent, Py_ssize_t position):
        """Return what a block with these extra keys ends with, or None if that is not fixed.

        In a pickle, an object that was written before is only referred to: the block's parent
        is entry 0, its token tuple 1, and so the entries of the keys are the same in any block.
        """
        cdef unsigned char tail[keys.MAX_KEYS_BYTES]
        cdef unsigned char* p = NULL
        cdef keys.Memo memo
        cdef const unsigned char* end = tail + sizeof(tail) - 3
        if self._native_encoding and self._is_cbor:
            p = keys.put_cbor(tail, end, <PyObject*> extra_keys, 0)
        elif self._native_encoding:
            memo.entries[0] = <PyObject*> parent
            memo.entries[1] = NULL
            memo.num_entries = 2
            p = keys.put_pickle(tail, end, <PyObject*> extra_keys, &memo, 0)
            if p != NULL:
                memcpy(p, PyBytes_AS_STRING(PICKLE_END), 3)
                p += 3
        if p != NULL:
            return tail[:p - tail]
        return self.tail_by_library(extra_keys, parent, position)

    cdef bytes tail_by_library(self, object extra_keys, bytes parent, Py_ssize_t position):
        """Do the same for any extra keys: serialize them with a parent and one token before
        them, which fill the memo's first two entries, and cut these off."""
        cdef Py_ssize_t start = encode.FRAME_HEADER_BYTES + 2 + self.hash_width + 1
        try:
            if self._is_cbor:
                return serialize(extra_keys, True)
            message = serialize((parent, (0,), extra_keys), False)
        except (ModuleNotFoundError, MemoryError):
            raise
        except Exception as error:
            raise self.keys_error(extra_keys, position, error) from error
        if (
            len(message) - encode.FRAME_HEADER_BYTES >= encode.FRAME_BYTES_LIMIT
            or int.from_bytes(message[3:11], "little") != len(message) - encode.FRAME_HEADER_BYTES
            or message[start:start + 4] != b"K\x00\x85\x94"
        ):
            return None
        return message[start + 4:]


def _make_hasher(hash_block_size, algorithm, root):
    return BlockHasher(hash_block_size, algorithm, root=root)


cdef bint pickle_is_known() except -1:
    """Whether this Python's pickler writes the bytes that `encode` and `keys` do."""
    cdef unsigned char message[2048]
    cdef int64_t values[24]
    cdef unsigned char* p
    cdef keys.Memo memo
    cdef bytes parent
    samples = [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**39, 2**40 - 1, 2**63 - 1]
    samples += [-value - 1 for value in samples]
    for i, value in enumerate(samples):
        values[i] = value
    name = "a name"
    shared = ("", name, b"", 5)
    extra_keys = (("lora", name, name), shared, shared, (), (None, True, False, -300, b"d"), "x")
    for num_tokens in (1, 2, 3, 4, len(samples)):
        for parent in (bytes(range(16)), bytes(range(32))):
            p = encode.put_pickle_block(message, parent, len(parent), values, num_tokens)
            memo.entries[0] = <PyObject*> parent
            memo.entries[1] = NULL
            memo.num_entries = 2
            p = keys.put_pickle(p, message + sizeof(message), <PyObject*> extra_keys, &memo, 0)
            memcpy(p, PyBytes_AS_STRING(PICKLE_END), 3)
            p += 3
            encode.close_pickle_frame(message, p - message)
            block = (parent, tuple(samples[:num_tokens]), extra_keys)
            if message[:p - message] != pickle.dumps(block, protocol=5):
                return False
    return True


cdef bint PICKLE_IS_KNOWN = pickle_is_known()
load_sha256()
