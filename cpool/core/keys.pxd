# SPDX-License-Identifier: Apache-2.0
# Keys: a digest in a key space.
#
# A key is (digest, group). Its group and the digest's width are interned as a *space*, so a
# registration pays two bytes for them. Space 0 means "no key".
#
# The table's own hash is NH (Black et al., UMAC, CRYPTO '99) over the digest's 64-bit words
# with random words drawn per pool, folded to 31 bits above a 0, which is the table's. Digests
# can be chosen by whoever writes the prompt when they are xxhash; without the random words he
# cannot choose where they land. Each space then flips bits of its own, so one digest never has
# one hash in two spaces of its width: where digest and hash are the same, the space is too.
from cpool.core.types cimport hash_t, space_t, uint8_t, uint32_t, uint64_t

cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <string.h>
    #ifdef __SSE2__
    #include <emmintrin.h>
    #endif

    #define CPOOL_MAX_SEED_WORDS 35

    /* Debug builds can make keys collide. */
    static uint32_t cpool_hash_mask = 0xFFFFFFFF;

    static inline uint64_t cpool_word(const uint8_t *bytes) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        return word;
    }

    static inline uint32_t cpool_fold(unsigned __int128 sum, const uint64_t *seed) {
        uint64_t x = (uint64_t)sum ^ ((uint64_t)(sum >> 64) * (seed[0] | 1));
        x ^= x >> 32;
        x *= seed[1] | 1;
        uint32_t hash = (uint32_t)(x >> 32);
    #if CPOOL_DEBUG
        hash &= cpool_hash_mask;
    #endif
        return hash;
    }

    /* An even number. `salt` stands for the space; seed holds CPOOL_MAX_SEED_WORDS random
       words. */
    static inline uint32_t cpool_hash_key(const uint8_t *digest, uint32_t width,
                                          uint32_t salt, const uint64_t *seed) {
        const uint64_t *k = seed + 2;
        unsigned __int128 sum = 0;
        if (width == 32) {
            sum += (unsigned __int128)(cpool_word(digest) + k[0]) * (cpool_word(digest + 8) + k[1]);
            sum += (unsigned __int128)(cpool_word(digest + 16) + k[2])
                 * (cpool_word(digest + 24) + k[3]);
        } else if (width == 16) {
            sum += (unsigned __int128)(cpool_word(digest) + k[0]) * (cpool_word(digest + 8) + k[1]);
        } else {
            for (uint32_t i = 0; i < width; i += 16) {
                uint8_t padded[16] = {0};
                memcpy(padded, digest + i, width - i < 16 ? width - i : 16);
                sum += (unsigned __int128)(cpool_word(padded) + k[i / 8])
                     * (cpool_word(padded + 8) + k[i / 8 + 1]);
            }
        }
        return (cpool_fold(sum, seed) & ~(uint32_t)1) ^ salt;
    }

    static inline int cpool_same_digest(const uint8_t *a, const uint8_t *b, uint32_t width) {
    #ifdef __SSE2__
        if (width == 32 || width == 16) {
            __m128i same = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)a),
                                          _mm_loadu_si128((const __m128i *)b));
            if (width == 32)
                same = _mm_and_si128(same,
                                     _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)a + 1),
                                                    _mm_loadu_si128((const __m128i *)b + 1)));
            return _mm_movemask_epi8(same) == 0xFFFF;
        }
    #endif
        return memcmp(a, b, width) == 0;
    }

    /* The usual widths without a call. */
    static inline void cpool_copy_digest(uint8_t *target, const uint8_t *digest, uint32_t width) {
        if (width == 32)
            memcpy(target, digest, 32);
        else if (width == 16)
            memcpy(target, digest, 16);
        else
            memcpy(target, digest, width);
    }
    """
    uint32_t hash_mask "cpool_hash_mask"
    hash_t hash_key "cpool_hash_key"(
        const uint8_t* digest, uint32_t width, hash_t salt, const uint64_t* seed
    ) noexcept
    bint same_digest "cpool_same_digest"(
        const uint8_t* a, const uint8_t* b, uint32_t width
    ) noexcept
    void copy_digest "cpool_copy_digest"(
        uint8_t* target, const uint8_t* digest, uint32_t width
    ) noexcept

cdef enum:
    NUM_SEED_WORDS = 35     # two to fold, one for each word of the longest digest, one for salts
    MAX_SPACES = 8191       # (group, width) pairs in one pool: what SPACE_MASK can name


cdef struct Space:
    uint32_t group          # kv_cache_group_id
    uint32_t width          # bytes of a digest
    hash_t salt             # bits that the space flips in the table's hash: no other has these


cdef struct Key:
    const uint8_t* digest   # `width` bytes; borrowed
    space_t space           # no flags


cdef inline hash_t salt_of(space_t space, const uint64_t* seed) noexcept:
    # Even. Half the factor is odd, so no two spaces get the same.
    return <hash_t>(space - 1) * <hash_t>(seed[NUM_SEED_WORDS - 1] << 1 | 2)
