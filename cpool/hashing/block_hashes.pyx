# SPDX-License-Identifier: Apache-2.0
"""The hashes of one growing sequence, and views of them at coarser block sizes.

`BlockHashes` keeps all hashes in one array of rows and behaves like a list of bytes. Its
buffer, and that of a view, is a snapshot: rows that an open buffer shows are never written
again nor freed while it is open, because a sequence that has to write there moves to a new
array first.
"""

from collections.abc import Sequence

cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyNumber_AsSsize_t
from libc.string cimport memcpy

from cpool.hashing cimport keys, token_source
from cpool.hashing.chain cimport BlockHasher
from cpool.hashing.token_source cimport Tokens


cdef enum:
    MAX_HASH_WIDTH = 32  # bytes
    MAX_BLOCK_SIZE = 0x7FFFFFFF  # tokens of a view's block


class BlockSizeError(ValueError, AssertionError):
    """A view's block size is not a multiple of the sequence's.

    Also an AssertionError, which is what vLLM's view raises.
    """


@cython.final
cdef class _Rows:
    """An array of digests, and what open buffers see of it."""

    cdef unsigned char* data
    cdef Py_ssize_t width  # bytes a row
    cdef Py_ssize_t num_allocated  # rows
    cdef Py_ssize_t num_buffers  # open ones
    cdef Py_ssize_t num_shown  # rows below this may be seen by an open buffer

    def __cinit__(self, Py_ssize_t width, Py_ssize_t num_allocated):
        self.width = width
        self.data = <unsigned char*> PyMem_RawMalloc(max(1, num_allocated * width))
        if self.data == NULL:
            raise MemoryError
        self.num_allocated = num_allocated

    def __dealloc__(self):
        PyMem_RawFree(self.data)

    cdef int show(
        self, Py_buffer* buffer, int flags, Py_ssize_t num_rows, Py_ssize_t scale_factor
    ) except -1:
        """Export every `scale_factor`-th of the first `num_rows` rows, ending with each."""
        cdef Py_ssize_t num_shown = num_rows // scale_factor
        cdef Py_ssize_t* dims
        if flags & PyBUF_WRITABLE:
            raise BufferError("block hashes are read-only")
        if scale_factor > 1 and flags & PyBUF_STRIDES != PyBUF_STRIDES:
            raise BufferError("a view at a coarser block size is not contiguous")
        dims = <Py_ssize_t*> PyMem_RawMalloc(4 * sizeof(Py_ssize_t))
        if dims == NULL:
            raise MemoryError
        dims[0] = num_shown
        dims[1] = self.width
        dims[2] = self.width * scale_factor
        dims[3] = 1
        buffer.buf = self.data + (self.width * (scale_factor - 1) if num_shown else 0)
        buffer.len = num_shown * self.width
        buffer.itemsize = 1
        buffer.readonly = True
        buffer.format = NULL
        if flags & PyBUF_FORMAT:
            buffer.format = b"B"
        buffer.ndim = 2 if flags & PyBUF_ND else 1
        buffer.shape = dims if flags & PyBUF_ND else NULL
        buffer.strides = dims + 2 if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        buffer.suboffsets = NULL
        buffer.internal = dims
        buffer.obj = self
        self.num_buffers += 1
        self.num_shown = max(self.num_shown, num_rows)
        return 0

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        raise BufferError("rows are exported by what holds them")

    def __releasebuffer__(self, Py_buffer* buffer):
        PyMem_RawFree(buffer.internal)
        self.num_buffers -= 1
        if self.num_buffers == 0:
            self.num_shown = 0


@cython.internal
cdef class HashSequence:
    """Reading as a list of bytes is read, for a class that says how many hashes and which."""

    cdef Py_ssize_t num_hashes(self) except -1:
        raise NotImplementedError

    cdef object at(self, Py_ssize_t i):
        """Return hash i, which is within the sequence."""
        raise NotImplementedError

    def __len__(self):
        return self.num_hashes()

    def __getitem__(self, index):
        cdef Py_ssize_t i, num_hashes = self.num_hashes()
        cdef int overflow = 1
        if type(index) is int:
            i = PyLong_AsLongLongAndOverflow(index, &overflow)
        elif isinstance(index, slice):
            return [self.at(i) for i in range(*index.indices(num_hashes))]
        if overflow:
            i = PyNumber_AsSsize_t(index, IndexError)
        if i < 0:
            i += num_hashes
        if not 0 <= i < num_hashes:
            raise IndexError(f"block hash {index} of {num_hashes}")
        return self.at(i)

    def __iter__(self):
        cdef Py_ssize_t i = 0
        while i < self.num_hashes():
            yield self.at(i)
            i += 1

    def __contains__(self, block_hash):
        return block_hash in self[:]

    def index(self, block_hash, *bounds):
        """Return the first place of `block_hash`, as `list.index` does."""
        return self[:].index(block_hash, *bounds)

    def count(self, block_hash):
        """Return how often `block_hash` occurs."""
        return self[:].count(block_hash)

    def tolist(self):
        """Return the hashes as a list of bytes."""
        return self[:]

    def __eq__(self, other):
        if not isinstance(other, (list, HashSequence)):
            return NotImplemented
        return len(self) == len(other) and self[:] == other[:]


@cython.final
cdef class BlockHashes(HashSequence):
    """The chained hashes of one sequence's full blocks: a compact list of bytes.

    Feed it tokens and it hashes each boundary once; the tokens behind the last boundary wait
    in it for their block to fill. Reading works as on a list of bytes. It also exports a
    read-only buffer of shape (n, hash_width) and type uint8, without copying; a buffer is a
    snapshot that later changes neither alter nor invalidate.

    Args:
        hasher: Makes the hashes, and fixes block size and width.
        token_ids: The first tokens, as for `append_tokens`.
        extra_keys: As for `append_tokens`.
    """

    cdef readonly BlockHasher hasher
    cdef _Rows _rows
    cdef Py_ssize_t _num_hashes
    cdef list _waiting  # tokens behind the last boundary, fewer than a block
    cdef object __weakref__

    def __cinit__(self, BlockHasher hasher not None, token_ids=(), extra_keys=None):
        self.hasher = hasher
        self._waiting = []
        self._rows = _Rows(hasher.hash_width, 0)
        self.append_tokens(token_ids, extra_keys)

    # What it holds.

    @property
    def hash_block_size(self):
        """Tokens per hash."""
        return self.hasher.hash_block_size

    @property
    def hash_width(self):
        """Bytes per hash."""
        return self.hasher.hash_width

    @property
    def num_tokens(self):
        """Tokens of the sequence: those hashed and those that wait for a full block."""
        return self._num_hashes * self.hasher.hash_block_size + len(self._waiting)

    @property
    def nbytes(self):
        """Bytes of the hashes themselves."""
        return self._num_hashes * self.hasher.hash_width

    def __sizeof__(self):
        return (
            object.__sizeof__(self) + object.__sizeof__(self._rows)
            + self._rows.num_allocated * self.hasher.hash_width + self._waiting.__sizeof__()
        )

    # How it changes. Each method checks and hashes first and commits last.

    def append_tokens(self, token_ids, extra_keys=None):
        """Append tokens and hash the boundaries they reach.

        Args:
            token_ids: Integers: a list, tuple, other iterable, or a one-dimensional
                buffer of any integer type.
            extra_keys: None, one entry (a tuple or None) per boundary reached, or a
                function of a block's first token index and the index after its last.

        Raises:
            TypeError: A token or an extra key cannot be hashed; the message names its
                place. Nothing was appended.
            ValueError: The number of extra keys is not that of the boundaries reached.
        """
        cdef Tokens tokens
        if not token_source.is_readable(token_ids):
            if not hasattr(token_ids, "__iter__") and not hasattr(token_ids, "__getitem__"):
                raise TypeError(f"token_ids must be integers, not {type(token_ids).__name__}")
            token_ids = list(token_ids)
        token_source.open(&tokens, token_ids)
        try:
            self.append_opened(&tokens, extra_keys)
        finally:
            token_source.close(&tokens)

    def append_token(self, token_id, extra_keys=None):
        """Append one token, as `append_tokens` would, for decoding token by token."""
        cdef list waiting
        cdef int is_hashed = 0
        if type(token_id) is not int:
            self.hasher.check_token(token_id, self.num_tokens)
        waiting = self._waiting
        if len(waiting) + 1 < self.hasher.hash_block_size:
            if extra_keys is not None:
                keys.check_num_keys(extra_keys, 0)
            waiting.append(token_id)
            return
        if extra_keys is None:
            waiting.append(token_id)
            try:
                is_hashed = self.hash_waiting()
            finally:
                if not is_hashed:
                    waiting.pop()
        if not is_hashed:
            self.append_tokens((token_id,), extra_keys)

    cdef int hash_waiting(self) except -1:
        """Hash the full block that waits; 0 if the serializer has to write it."""
        cdef unsigned char block_hash[MAX_HASH_WIDTH]
        cdef Py_ssize_t width = self._rows.width
        cdef const unsigned char* parent
        cdef list waiting = []
        cdef Tokens tokens
        if self._num_hashes:
            parent = self._rows.data + (self._num_hashes - 1) * width
        else:
            parent = <const unsigned char*> PyBytes_AS_STRING(self.hasher.root)
        token_source.open(&tokens, self._waiting)
        if not self.hasher.hash_natively(&tokens, 0, parent, self.hasher.no_keys, block_hash):
            return 0
        self.reserve(1)
        # Nothing below can fail.
        memcpy(self._rows.data + self._num_hashes * width, block_hash, width)
        self._num_hashes += 1
        self._waiting = waiting
        return 1

    cdef int append_opened(self, const Tokens* tokens, object extra_keys) except -1:
        cdef Py_ssize_t size = self.hasher.hash_block_size
        cdef Py_ssize_t num_waiting = len(self._waiting)
        cdef Py_ssize_t num_blocks = (num_waiting + tokens.num_tokens) // size
        # How many of `tokens` go into full blocks; the rest waits.
        cdef Py_ssize_t num_used = num_blocks * size - num_waiting if num_blocks else 0
        cdef Py_ssize_t position = self.num_tokens + num_used
        cdef Tokens joined
        cdef tuple all_tokens, rest
        cdef list waiting
        cdef bytes hashes
        rest = token_source.objects(tokens, num_used, tokens.num_tokens - num_used)
        for token in rest:
            self.hasher.check_token(token, position)
            position += 1
        if num_blocks == 0:
            keys.check_num_keys(extra_keys, 0)
            self._waiting.extend(rest)
            return 0
        if num_waiting == 0:
            hashes = self.hash_blocks(tokens, num_blocks, extra_keys)
        else:
            all_tokens = tuple(self._waiting) + token_source.objects(tokens, 0, num_used)
            token_source.open(&joined, all_tokens)
            hashes = self.hash_blocks(&joined, num_blocks, extra_keys)
        waiting = list(rest)
        # Nothing below can fail.
        self.put(hashes)
        self._waiting = waiting
        return 0

    cdef bytes hash_blocks(self, const Tokens* tokens, Py_ssize_t num_blocks, object extra_keys):
        """Hash the next blocks, from the start of `tokens`, and make room for `put`."""
        cdef Py_ssize_t num_hashes = self._num_hashes
        cdef Py_ssize_t num_waiting = len(self._waiting)
        cdef bytes hashes = self.hasher.hash_run(
            tokens, 0, num_blocks, self.last_hash(), extra_keys,
            num_hashes * self.hasher.hash_block_size,
        )
        if self._num_hashes != num_hashes or len(self._waiting) != num_waiting:
            raise ValueError("the sequence was changed by its own extra_keys function")
        self.reserve(num_blocks)
        return hashes

    def truncate(self, num_tokens, token_ids=None):
        """Keep the first `num_tokens` tokens, as after rejected speculative tokens.

        A hash cannot be taken apart: if `num_tokens` lies inside a block that has been
        hashed, the tokens of that block are needed again.

        Args:
            num_tokens: Tokens to keep, at most those held.
            token_ids: The sequence's tokens from its start. Only those between the last
                boundary kept and `num_tokens` are read.

        Raises:
            ValueError: `num_tokens` is out of range, or it lies inside a hashed block and
                `token_ids` was not given or is too short. Nothing was changed.
        """
        cdef Py_ssize_t size = self.hasher.hash_block_size
        cdef Py_ssize_t kept, num_blocks, boundary
        num_tokens = token_source.integer(num_tokens, "num_tokens")
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"num_tokens is {num_tokens}, not within 0 and {self.num_tokens}")
        kept = num_tokens
        num_blocks = kept // size
        boundary = num_blocks * size
        if num_blocks == self._num_hashes:
            waiting = self._waiting[:kept - boundary]
        elif kept == boundary:
            waiting = []
        elif token_ids is None or len(token_ids) < kept:
            raise ValueError(
                f"tokens {boundary} to {kept - 1} are needed again to truncate to {kept} tokens"
            )
        else:
            waiting = list(token_ids[boundary:kept])
            for i, token in enumerate(waiting):
                self.hasher.check_token(token, boundary + i)
        self._num_hashes = num_blocks
        self._waiting = waiting

    def append(self, block_hash):
        """Append one hash that was made elsewhere; see `extend`."""
        self.extend((block_hash,))

    def extend(self, block_hashes):
        """Append hashes that were made elsewhere, for one block each.

        Args:
            block_hashes: An iterable of bytes, `hash_width` each.

        Raises:
            TypeError: One is not bytes. Nothing was appended.
            ValueError: One has another width, or tokens wait for a full block, which a
                hash cannot follow. Nothing was appended.
        """
        cdef list hashes = list(block_hashes)
        for block_hash in hashes:
            self.hasher.checked_parent(block_hash)
        if hashes and self._waiting:
            raise ValueError(
                f"{len(self._waiting)} tokens wait for a full block; a hash cannot follow them"
            )
        self.reserve(len(hashes))
        for block_hash in hashes:
            self.put(block_hash)

    def __delitem__(self, index):
        """Drop the hashes from a place to the end, and the tokens behind them: `del h[n:]`."""
        if not isinstance(index, slice):
            raise TypeError("hashes can only be dropped from a place to the end: del h[n:]")
        start, stop, step = index.indices(self._num_hashes)
        if step != 1 or stop != self._num_hashes:
            raise ValueError("hashes can only be dropped from a place to the end: del h[n:]")
        self._num_hashes = start
        self._waiting = []

    def clear(self):
        """Drop all hashes and tokens."""
        self._num_hashes = 0
        self._waiting = []

    def copy(self):
        """Return an independent sequence of the same hashes and tokens."""
        cdef BlockHashes fresh = BlockHashes(self.hasher)
        fresh.reserve(self._num_hashes)
        memcpy(fresh._rows.data, self._rows.data, self.nbytes)
        fresh._num_hashes = self._num_hashes
        fresh._waiting = self._waiting.copy()
        return fresh

    __copy__ = copy

    # How it is read.

    def view(self, block_size):
        """Return the hashes at `block_size`, a multiple of `hash_block_size`; never stale."""
        return BlockHashListWithBlockSize(self, self.hasher.hash_block_size, block_size)

    def __repr__(self):
        return (
            f"<BlockHashes: {self._num_hashes} {self.hasher.algorithm} hashes, "
            f"{self.num_tokens} tokens, hash_block_size {self.hasher.hash_block_size}>"
        )

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        self._rows.show(buffer, flags, self._num_hashes, 1)

    def __reduce__(self):
        return _rebuild, (self.hasher, self[:], self._waiting)

    # Rows.

    cdef Py_ssize_t num_hashes(self) except -1:
        return self._num_hashes

    cdef object at(self, Py_ssize_t i):
        return self.row(i)

    cdef bytes row(self, Py_ssize_t i):
        cdef Py_ssize_t width = self._rows.width
        return PyBytes_FromStringAndSize(<char*> self._rows.data + i * width, width)

    cdef bytes last_hash(self):
        return self.row(self._num_hashes - 1) if self._num_hashes else self.hasher.root

    cdef int reserve(self, Py_ssize_t num_rows) except -1:
        """Make the next `num_rows` rows writable, in a new array if a buffer shows them."""
        cdef Py_ssize_t needed = self._num_hashes + num_rows
        cdef _Rows fresh
        if needed <= self._rows.num_allocated and self._rows.num_shown <= self._num_hashes:
            return 0
        if self._num_hashes:
            needed += needed // 8 + 2  # room ahead, so that appending stays linear
        fresh = _Rows(self._rows.width, needed)
        memcpy(fresh.data, self._rows.data, self._num_hashes * fresh.width)
        self._rows = fresh
        return 0

    cdef void put(self, bytes hashes) noexcept:
        """Append rows for which `reserve` has made room."""
        cdef Py_ssize_t width = self._rows.width
        memcpy(
            self._rows.data + self._num_hashes * width,
            PyBytes_AS_STRING(hashes),
            PyBytes_GET_SIZE(hashes),
        )
        self._num_hashes += PyBytes_GET_SIZE(hashes) // width


def _rebuild(hasher, block_hashes, waiting):
    hashes = BlockHashes(hasher)
    hashes.extend(block_hashes)
    hashes.append_tokens(waiting)
    return hashes


@cython.final
cdef class BlockHashListWithBlockSize(HashSequence):
    """Block hashes seen at a multiple of their block size; vLLM's class of this name.

    A hash covers its whole prefix, so block i's is the one at the block's last boundary. A
    view holds no hashes and asks the sequence each time, so it is never stale. Over
    `BlockHashes` it also exports a read-only strided buffer of shape (n, hash_width). It
    indexes as a list of its length does, also from the end, where vLLM's class counts from
    the end of the underlying list and so may return a hash inside a block.

    Args:
        block_hashes: A sequence of bytes: `BlockHashes`, a list, or another view.
        hash_block_size: Tokens per entry of `block_hashes`.
        target_block_size: Tokens per entry of the view, a multiple of `hash_block_size`.

    Raises:
        BlockSizeError: It is not a multiple.
    """

    cdef readonly object block_hashes
    cdef readonly Py_ssize_t scale_factor

    def __cinit__(self, block_hashes, hash_block_size, target_block_size):
        if not hasattr(block_hashes, "__getitem__"):
            raise TypeError(
                f"block_hashes must be a sequence of bytes, not {type(block_hashes).__name__}"
            )
        hash_block_size = token_source.integer(hash_block_size, "hash_block_size")
        target_block_size = token_source.integer(target_block_size, "target_block_size")
        if hash_block_size < 1 or target_block_size < 1 or target_block_size % hash_block_size:
            raise BlockSizeError(
                f"target_block_size {target_block_size} is not a multiple of "
                f"hash_block_size {hash_block_size}"
            )
        if target_block_size > MAX_BLOCK_SIZE:
            raise BlockSizeError(
                f"target_block_size is {target_block_size}; the limit is {MAX_BLOCK_SIZE}"
            )
        self.block_hashes = block_hashes
        self.scale_factor = target_block_size // hash_block_size

    cdef Py_ssize_t num_hashes(self) except -1:
        return len(self.block_hashes) // self.scale_factor

    def __repr__(self):
        return f"<BlockHashListWithBlockSize: {len(self)} hashes, every {self.scale_factor}th>"

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if type(self.block_hashes) is not BlockHashes:
            raise BufferError("only a view of BlockHashes has a buffer")
        (<BlockHashes> self.block_hashes)._rows.show(
            buffer, flags, (<BlockHashes> self.block_hashes)._num_hashes, self.scale_factor
        )

    cdef object at(self, Py_ssize_t i):
        cdef Py_ssize_t fine = (i + 1) * self.scale_factor - 1
        if type(self.block_hashes) is BlockHashes:
            return (<BlockHashes> self.block_hashes).row(fine)
        return self.block_hashes[fine]


def hash_tokens(token_ids, hash_block_size, algorithm="sha256", *, root=None, extra_keys=None):
    """Hash every full block of a token sequence, to the same bytes as vLLM 0.32.

    Args:
        token_ids: Integers: a list, tuple, other iterable, or a one-dimensional buffer of
            any integer type (numpy array, array.array).
        hash_block_size: Tokens per block, at least 1.
        algorithm: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor".
        root: The hash before the first block; the algorithm's `default_root` if None.
        extra_keys: None, one entry (a tuple or None) per full block, or a function of a
            block's first token index and the index after its last.

    Returns:
        BlockHashes: One hash per full block. It can go on growing.

    Raises:
        TypeError: A token is not an integer, or a token or extra key cannot be encoded; the
            message names its place.
        ValueError: Unknown algorithm, block size below 1, root of the wrong width, or a
            number of extra keys that is not that of the blocks.
        ModuleNotFoundError: The algorithm needs a package that is missing.
    """
    return BlockHashes(BlockHasher(hash_block_size, algorithm, root=root), token_ids, extra_keys)


Sequence.register(HashSequence)
