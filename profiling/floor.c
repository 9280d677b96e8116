/* SPDX-License-Identifier: Apache-2.0
 *
 * What the memory system allows here, in ns an element, for one size of pool.
 *
 *     floor NUM_BLOCKS WIDTH      WIDTH: bytes of a key, a multiple of 8
 *
 * Prints one JSON object with "small_pages" and "huge_pages", each with
 *
 *     read_dependent   the next address is known only when a read returns: latency
 *     read_batch       64 addresses known at once, prefetched: throughput
 *     probe            look-up of a known key, alone: cell of a 70 % full table, then the key
 *     probe_batch      the same for 64 keys at once, cells and keys prefetched
 *     insert_batch     keys into an empty table that gets 70 % full, the key copied to a
 *                      random slot, 64 at once
 *     unlink_batch     12-byte nodes out of a doubly linked ring in random order, 64 at once
 *     evict_batch      a block's node is written, its key read, and the key's cell marked as
 *                      given up; blocks in random order, 64 at once
 *
 * Every look-up compares whole keys and its answer is checked. Times are CPU time.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define GIVEN_UP UINT32_MAX /* in a cell's lower half: searches go on */

enum { BATCH = 64, HUGE_PAGE = 2 << 20, MAX_STEPS = 4000000, MIN_STEPS = 200000 };

typedef struct { uint32_t prev, next, count; } Node;

static uint32_t num_blocks, width;
static uint64_t num_cells;
static uint64_t random_state = 88172645463325252ull;

static uint64_t random_word(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545F4914F6CDD1Dull;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static void *map(size_t nbytes, int huge) {
    size_t whole = (nbytes + 2 * HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1);
    char *start = mmap(NULL, whole + HUGE_PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    start = (char *)(((uintptr_t)start + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
    madvise(start, whole, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(start, 0, whole);
    return start;
}

static void shuffle(uint32_t *ids, size_t count) {
    for (size_t i = count; i > 1; i--) {
        size_t j = random_word() % i;
        uint32_t id = ids[i - 1];
        ids[i - 1] = ids[j];
        ids[j] = id;
    }
}

/* Keys are random, so the first word is as good a hash as any. */
static uint64_t home(const uint8_t *key) {
    uint64_t word;
    memcpy(&word, key, 8);
    return (uint64_t)(((unsigned __int128)word * num_cells) >> 64);
}

static int same(const uint8_t *a, const uint8_t *b) {
    uint64_t different = 0;
    for (uint32_t i = 0; i < width; i += 8) {
        uint64_t x, y;
        memcpy(&x, a + i, 8);
        memcpy(&y, b + i, 8);
        different |= x ^ y;
    }
    return different == 0;
}

/* A cell: upper half of the key's first word << 32 | block + 1; 0 when empty. */
static uint64_t cell_of(const uint8_t *key, uint32_t block) {
    uint32_t tag;
    memcpy(&tag, key, 4);
    return (uint64_t)tag << 32 | (block + 1);
}

static uint64_t following(uint64_t place) {
    return place + 1 == num_cells ? 0 : place + 1;
}

/* The first cell from `place` on that is empty or has the tag: most likely the key's. */
static uint64_t likely_place(const uint64_t *cells, uint64_t place, uint64_t tag) {
    while (cells[place] && cells[place] >> 32 != tag) place = following(place);
    return place;
}

/* The key's cell, or the empty one where it would go; the search starts at `place`. */
static uint64_t place_of(const uint64_t *cells, const uint8_t *slots, const uint8_t *key,
                         uint64_t place) {
    uint64_t tag = cell_of(key, 0) >> 32;
    while (cells[place = likely_place(cells, place, tag)] &&
           !same(slots + (size_t)((uint32_t)cells[place] - 1) * width, key))
        place = following(place);
    return place;
}

static int64_t block_at(const uint64_t *cells, uint64_t place) {
    return (int64_t)(uint32_t)cells[place] - 1;
}

static void check(int condition, const char *text) {
    if (!condition) {
        fprintf(stderr, "floor: %s\n", text);
        exit(1);
    }
}

static void measure(int huge, const uint8_t *keys, const uint32_t *order, size_t steps) {
    uint8_t *slots = map((size_t)num_blocks * width, huge);
    uint64_t *cells = map(num_cells * 8, huge);
    Node *nodes = map((size_t)num_blocks * sizeof(Node), huge);
    uint8_t *wanted = map(steps * width, huge);
    int64_t *found = map(steps * 8, huge);
    double start;

    /* insert_batch: block order[i] gets key i. All blocks, */
    start = now();
    for (size_t first = 0; first < num_blocks; first += BATCH) {
        size_t end = first + BATCH < num_blocks ? first + BATCH : num_blocks;
        for (size_t i = first; i < end; i++) {
            __builtin_prefetch(&cells[home(keys + i * width)], 1);
            __builtin_prefetch(slots + (size_t)order[i] * width, 1);
        }
        for (size_t i = first; i < end; i++) {
            const uint8_t *key = keys + i * width;
            cells[place_of(cells, slots, key, home(key))] = cell_of(key, order[i]);
            memcpy(slots + (size_t)order[i] * width, key, width);
        }
    }
    double insert_batch = (now() - start) / num_blocks;

    uint32_t *picked = malloc(steps * sizeof *picked);
    check(picked != NULL, "out of memory");
    for (size_t i = 0; i < steps; i++) {
        picked[i] = random_word() % num_blocks;
        memcpy(wanted + i * width, slots + (size_t)picked[i] * width, width);
    }

    /* read_dependent: what is read is part of the next address. */
    uint32_t at = 0;
    start = now();
    for (size_t i = 0; i < steps; i++) {
        uint64_t word;
        memcpy(&word, slots + (size_t)at * width, 8);
        at = (uint32_t)((picked[i] + (word & 1)) % num_blocks);
    }
    double read_dependent = (now() - start) / steps;

    uint64_t sum = at;
    start = now();
    for (size_t first = 0; first + BATCH <= steps; first += BATCH) {
        for (size_t i = first; i < first + BATCH; i++)
            __builtin_prefetch(slots + (size_t)picked[i] * width);
        for (size_t i = first; i < first + BATCH; i++)
            sum += *(uint64_t *)(slots + (size_t)picked[i] * width);
    }
    double read_batch = (now() - start) / steps;

    start = now();
    for (size_t i = 0; i < steps; i++)
        found[i] = block_at(cells, place_of(cells, slots, wanted + i * width,
                                            home(wanted + i * width)));
    double probe = (now() - start) / steps;
    for (size_t i = 0; i < steps; i++) check(found[i] == picked[i], "probe found another block");

    start = now();
    for (size_t first = 0; first < steps; first += BATCH) {
        size_t end = first + BATCH < steps ? first + BATCH : steps;
        uint64_t places[BATCH];
        for (size_t i = first; i < end; i++) {
            places[i - first] = home(wanted + i * width);
            __builtin_prefetch(&cells[places[i - first]]);
        }
        for (size_t i = first; i < end; i++) {
            uint64_t tag = cell_of(wanted + i * width, 0) >> 32;
            uint64_t place = likely_place(cells, places[i - first], tag);
            places[i - first] = place;
            if (cells[place])
                __builtin_prefetch(slots + (size_t)block_at(cells, place) * width);
        }
        for (size_t i = first; i < end; i++)
            found[i] = block_at(cells, place_of(cells, slots, wanted + i * width,
                                                places[i - first]));
    }
    double probe_batch = (now() - start) / steps;
    for (size_t i = 0; i < steps; i++) check(found[i] == picked[i], "batch found another block");

    /* unlink_batch: the ring is in random order, node 0 stays. */
    for (size_t i = 0; i < num_blocks; i++) {
        uint32_t id = order[i], next = order[i + 1 == num_blocks ? 0 : i + 1];
        nodes[id].next = next;
        nodes[next].prev = id;
    }
    uint32_t *leaving = malloc(num_blocks * sizeof *leaving);
    check(leaving != NULL, "out of memory");
    size_t num_leaving = 0;
    for (uint32_t id = 1; id < num_blocks; id++) leaving[num_leaving++] = id;
    shuffle(leaving, num_leaving);
    start = now();
    for (size_t first = 0; first < num_leaving; first += BATCH) {
        size_t end = first + BATCH < num_leaving ? first + BATCH : num_leaving;
        for (size_t i = first; i < end; i++) __builtin_prefetch(&nodes[leaving[i]], 1);
        for (size_t i = first; i < end; i++) {
            __builtin_prefetch(&nodes[nodes[leaving[i]].prev], 1);
            __builtin_prefetch(&nodes[nodes[leaving[i]].next], 1);
        }
        for (size_t i = first; i < end; i++) {
            Node *node = &nodes[leaving[i]];
            nodes[node->prev].next = node->next;
            nodes[node->next].prev = node->prev;
            node->count++;
        }
    }
    double unlink_batch = (now() - start) / num_leaving;
    check(nodes[0].next == 0 && nodes[0].prev == 0, "the ring is not empty");

    /* evict_batch: every block, as in an allocation that knows which ones it will get. */
    start = now();
    for (size_t first = 0; first < num_blocks; first += BATCH) {
        size_t end = first + BATCH < num_blocks ? first + BATCH : num_blocks;
        uint64_t places[BATCH];
        for (size_t i = first; i < end; i++) {
            __builtin_prefetch(&nodes[order[i]], 1);
            __builtin_prefetch(slots + (size_t)order[i] * width);
        }
        for (size_t i = first; i < end; i++) {
            places[i - first] = home(slots + (size_t)order[i] * width);
            __builtin_prefetch(&cells[places[i - first]], 1);
        }
        for (size_t i = first; i < end; i++) {
            uint64_t place = places[i - first];
            while ((uint32_t)cells[place] != order[i] + 1) place = following(place);
            cells[place] = GIVEN_UP;
            nodes[order[i]] = (Node){GIVEN_UP, GIVEN_UP, 1};
        }
    }
    double evict_batch = (now() - start) / num_blocks;
    for (uint64_t place = 0; place < num_cells; place++)
        check(!cells[place] || cells[place] == GIVEN_UP, "a key is left");

    printf("\"%s\": {\"read_dependent\": %.2f, \"read_batch\": %.2f, \"probe\": %.2f, "
           "\"probe_batch\": %.2f, \"insert_batch\": %.2f, \"unlink_batch\": %.2f, "
           "\"evict_batch\": %.2f, "
           "\"ignore\": %" PRIu64 "}",
           huge ? "huge_pages" : "small_pages", read_dependent, read_batch, probe, probe_batch,
           insert_batch, unlink_batch, evict_batch, sum & 1);
    free(picked);
    free(leaving);
    munmap(slots, (size_t)num_blocks * width);
    munmap(cells, num_cells * 8);
    munmap(nodes, (size_t)num_blocks * sizeof(Node));
    munmap(wanted, steps * width);
    munmap(found, steps * 8);
}

int main(int argc, char **argv) {
    check(argc == 3, "usage: floor NUM_BLOCKS WIDTH");
    num_blocks = (uint32_t)strtoul(argv[1], NULL, 10);
    width = (uint32_t)strtoul(argv[2], NULL, 10);
    check(num_blocks > 1 && width >= 8 && width % 8 == 0, "bad size or width");
    num_cells = (uint64_t)num_blocks * 10 / 7 + 2;
    size_t steps = num_blocks < MIN_STEPS ? MIN_STEPS : num_blocks;
    if (steps > MAX_STEPS) steps = MAX_STEPS;

    uint8_t *keys = map((size_t)num_blocks * width, 1);
    uint32_t *order = malloc(num_blocks * sizeof *order);
    check(order != NULL, "out of memory");
    for (size_t i = 0; i < (size_t)num_blocks * width; i += 8) {
        uint64_t word = random_word();
        memcpy(keys + i, &word, 8);
    }
    for (uint32_t i = 0; i < num_blocks; i++) order[i] = i;
    shuffle(order, num_blocks);
    printf("{");
    measure(0, keys, order, steps);
    printf(", ");
    measure(1, keys, order, steps);
    printf("}\n");
    return 0;
}
