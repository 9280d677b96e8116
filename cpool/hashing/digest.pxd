# SPDX-License-Identifier: Apache-2.0
# Digest functions of libraries that are loaded anyway, reached without linking to them:
# SHA-256 of the libcrypto that Python's `_hashlib` uses, XXH3-128 of the xxhash package.
#
# SHA256_Init, _Update and _Final, not the one-shot SHA256(): since OpenSSL 3 that one looks
# its algorithm up by name at each call, which costs more than the digest of a block.

from libc.stdint cimport uint64_t

cdef extern from "dlfcn.h" nogil:
    void* dlopen(const char* filename, int flags)
    void* dlsym(void* handle, const char* symbol)
    int RTLD_NOW
    int RTLD_LOCAL

cdef enum:
    # OpenSSL's SHA256_CTX has 14 words of 8 bytes in all versions; the rest is margin.
    SHA256_STATE_WORDS = 64

ctypedef int (*sha256_init_t)(void* state) noexcept nogil
ctypedef int (*sha256_update_t)(void* state, const void* data, size_t num_bytes) noexcept nogil
ctypedef int (*sha256_final_t)(unsigned char* digest, void* state) noexcept nogil

ctypedef struct Xxh128:
    uint64_t low
    uint64_t high

ctypedef Xxh128 (*xxh3_128bits_t)(const void* data, size_t num_bytes) noexcept nogil

cdef struct Library:
    # NULL where the library could not be reached; all three of SHA-256 or none.
    sha256_init_t sha256_init
    sha256_update_t sha256_update
    sha256_final_t sha256_final
    xxh3_128bits_t xxh3_128bits


cdef inline void find_sha256(Library* library, const char* filename) noexcept:
    """Look in the shared object `filename`, or in the program itself if NULL."""
    cdef void* handle = dlopen(filename, RTLD_NOW | RTLD_LOCAL)
    if handle == NULL:
        return
    # The handle is never closed: the functions must stay.
    library.sha256_init = <sha256_init_t> dlsym(handle, b"SHA256_Init")
    library.sha256_update = <sha256_update_t> dlsym(handle, b"SHA256_Update")
    library.sha256_final = <sha256_final_t> dlsym(handle, b"SHA256_Final")
    if library.sha256_update == NULL or library.sha256_final == NULL:
        library.sha256_init = NULL


cdef inline void find_xxh3_128(Library* library, const char* filename) noexcept:
    cdef void* handle = dlopen(filename, RTLD_NOW | RTLD_LOCAL)
    if handle != NULL:
        library.xxh3_128bits = <xxh3_128bits_t> dlsym(handle, b"XXH3_128bits")


cdef inline void sha256(
    const Library* library, const unsigned char* data, size_t num_bytes, unsigned char* digest
) noexcept nogil:
    cdef uint64_t state[SHA256_STATE_WORDS]
    library.sha256_init(state)
    library.sha256_update(state, data, num_bytes)
    library.sha256_final(digest, state)


cdef inline void xxh3_128(
    const Library* library, const unsigned char* data, size_t num_bytes, unsigned char* digest
) noexcept nogil:
    """Write the canonical form, which is big-endian, high half first."""
    cdef Xxh128 value = library.xxh3_128bits(data, num_bytes)
    cdef int i
    for i in range(8):
        digest[i] = <unsigned char> (value.high >> (56 - 8 * i))
        digest[8 + i] = <unsigned char> (value.low >> (56 - 8 * i))
