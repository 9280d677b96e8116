/* SPDX-License-Identifier: Apache-2.0
 *
 * What the memory system allows here, in ns an element, for one size of pool.
 *
 *     floor NUM_BLOCKS WIDTH          WIDTH: bytes of a key, a multiple of 8
 *     floor NUM_BLOCKS WIDTH turns    a figure for each line of stdin, which names it
 *
 * Prints one JSON object with "small_pages" and "huge_pages", each with
 *
 *     read_dependent   the next address is known only when a read returns: latency
 *     read_batch       64 addresses known at once, prefetched: throughput
 *     probe            look-up of a known key, alone: cell of a 70 % full table, then the key
 *     probe_batch      the same for 64 keys at once, cells and keys prefetched
 *     insert_batch     keys into a table that gets 70 % full, the key copied to a random slot,
 *                      64 at once
 *     unlink_batch     12-byte nodes out of a doubly linked ring in random order, 64 at once
 *     evict_batch      a block's node is written, its key read, and the key's cell marked as
 *                      given up; blocks in random order, 64 at once
 *
 * each the least of REPEATS samples of 65,536 blocks (or half of all), before each of which the
 * caches are flushed. Every look-up compares whole keys and its answer is checked. Times are CPU
 * time.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define GIVEN_UP UINT32_MAX /* in a cell's lower half: searches go on */

enum { BATCH = 64, HUGE_PAGE = 2 << 20, SAMPLE = 65536, REPEATS = 7, FLUSH_BYTES = 64 << 20 };

typedef struct { uint32_t prev, next, count; } Node;

static uint32_t num_blocks, width, sample;
static uint64_t num_cells;
static uint64_t random_state = 88172645463325252ull;

/* All of one kind of pages. */
static uint8_t *slots;  /* a key for each block */
static uint64_t *cells;
static Node *nodes;
static uint8_t *wanted; /* keys of a sample */
static uint32_t *picked, *found;

static uint8_t *keys;   /* of all blocks, and of a sample more */
static uint32_t *order; /* block order[i] gets key i */
static uint64_t *junk, ignored;

static uint64_t random_word(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state * 0x2545F4914F6CDD1Dull;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
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
static uint64_t likely_place(uint64_t place, uint64_t tag) {
    while (cells[place] && cells[place] >> 32 != tag) place = following(place);
    return place;
}

/* The key's cell, or the empty one where it would go; the search starts at `place`. */
static uint64_t place_of(const uint8_t *key, uint64_t place) {
    uint64_t tag = cell_of(key, 0) >> 32;
    while (cells[place = likely_place(place, tag)] &&
           !same(slots + (size_t)((uint32_t)cells[place] - 1) * width, key))
        place = following(place);
    return place;
}

static uint32_t block_at(uint64_t place) { return (uint32_t)cells[place] - 1; }

static void check(int condition, const char *text) {
    if (!condition) {
        fprintf(stderr, "floor: %s\n", text);
        exit(1);
    }
}

/* Blocks order[from] to order[to] get their keys. */
static void insert(size_t from, size_t to) {
    for (size_t first = from; first < to; first += BATCH) {
        size_t end = first + BATCH < to ? first + BATCH : to;
        for (size_t i = first; i < end; i++) {
            __builtin_prefetch(&cells[home(keys + i * width)], 1);
            __builtin_prefetch(slots + (size_t)order[i] * width, 1);
        }
        for (size_t i = first; i < end; i++) {
            const uint8_t *key = keys + i * width;
            cells[place_of(key, home(key))] = cell_of(key, order[i]);
            memcpy(slots + (size_t)order[i] * width, key, width);
        }
    }
}

/* All but the last sample of blocks have their keys. */
static void prepare(void) {
    memset(cells, 0, num_cells * 8);
    insert(0, num_blocks - sample);
}

/* The caches hold nothing of the pool, only what a caller has at hand: ids, and keys in memory of
 * their own. */
static void flush(void) {
    for (size_t i = 0; i < FLUSH_BYTES / 8; i++) junk[i]++;
    for (size_t i = num_blocks - sample; i < num_blocks; i++)
        ignored += order[i] + keys[i * width] + picked[i - (num_blocks - sample)];
}

static void pick(void) {
    flush();
    for (uint32_t i = 0; i < sample; i++) {
        size_t key = random_word() % num_blocks;
        picked[i] = order[key];
        memcpy(wanted + (size_t)i * width, keys + key * width, width);
    }
}

static void check_found(void) {
    for (uint32_t i = 0; i < sample; i++) check(found[i] == picked[i], "found another block");
}

static double insert_batch(void) {
    prepare();
    flush();
    double start = now();
    insert(num_blocks - sample, num_blocks);
    return now() - start;
}

static double read_dependent(void) {
    uint32_t at = 0;
    pick();
    double start = now();
    for (uint32_t i = 0; i < sample; i++) {
        uint64_t word;
        memcpy(&word, slots + (size_t)at * width, 8);
        at = (uint32_t)((picked[i] + (word & 1)) % num_blocks);
    }
    ignored += at;
    return now() - start;
}

static double read_batch(void) {
    pick();
    double start = now();
    for (uint32_t first = 0; first + BATCH <= sample; first += BATCH) {
        for (uint32_t i = first; i < first + BATCH; i++)
            __builtin_prefetch(slots + (size_t)picked[i] * width);
        for (uint32_t i = first; i < first + BATCH; i++)
            ignored += *(uint64_t *)(slots + (size_t)picked[i] * width);
    }
    return now() - start;
}

static double probe(void) {
    pick();
    double start = now();
    for (uint32_t i = 0; i < sample; i++) {
        const uint8_t *key = wanted + (size_t)i * width;
        found[i] = block_at(place_of(key, home(key)));
    }
    double took = now() - start;
    check_found();
    return took;
}

static double probe_batch(void) {
    pick();
    double start = now();
    for (uint32_t first = 0; first < sample; first += BATCH) {
        uint32_t end = first + BATCH < sample ? first + BATCH : sample;
        uint64_t places[BATCH];
        for (uint32_t i = first; i < end; i++) {
            places[i - first] = home(wanted + (size_t)i * width);
            __builtin_prefetch(&cells[places[i - first]]);
        }
        for (uint32_t i = first; i < end; i++) {
            uint64_t tag = cell_of(wanted + (size_t)i * width, 0) >> 32;
            uint64_t place = likely_place(places[i - first], tag);
            places[i - first] = place;
            if (cells[place]) __builtin_prefetch(slots + (size_t)block_at(place) * width);
        }
        for (uint32_t i = first; i < end; i++)
            found[i] = block_at(place_of(wanted + (size_t)i * width, places[i - first]));
    }
    double took = now() - start;
    check_found();
    return took;
}

static double unlink_batch(void) {
    /* Node num_blocks is the ring's own. */
    uint32_t last = num_blocks;
    for (uint32_t i = 0; i <= num_blocks; i++) {
        uint32_t id = i == num_blocks ? num_blocks : order[i];
        nodes[last].next = id;
        nodes[id].prev = last;
        nodes[id].count = 0;
        last = id;
    }
    for (uint32_t i = 0, j = 0; i < sample; i++) {
        /* Different ones. */
        j += 1 + (uint32_t)(random_word() % (num_blocks / sample));
        picked[i] = j % num_blocks;
    }
    shuffle(picked, sample);
    flush();
    double start = now();
    for (uint32_t first = 0; first < sample; first += BATCH) {
        uint32_t end = first + BATCH < sample ? first + BATCH : sample;
        for (uint32_t i = first; i < end; i++) __builtin_prefetch(&nodes[picked[i]], 1);
        for (uint32_t i = first; i < end; i++) {
            __builtin_prefetch(&nodes[nodes[picked[i]].prev], 1);
            __builtin_prefetch(&nodes[nodes[picked[i]].next], 1);
        }
        for (uint32_t i = first; i < end; i++) {
            Node *node = &nodes[picked[i]];
            nodes[node->prev].next = node->next;
            nodes[node->next].prev = node->prev;
            node->count++;
        }
    }
    double took = now() - start;
    uint32_t left = 0;
    for (uint32_t id = nodes[num_blocks].next; id != num_blocks; id = nodes[id].next) left++;
    check(left == num_blocks - sample, "the ring has other nodes");
    return took;
}

/* As in an allocation that knows which blocks it will get. */
static double evict_batch(void) {
    prepare();
    insert(num_blocks - sample, num_blocks);
    flush();
    double start = now();
    for (uint32_t first = 0; first < sample; first += BATCH) {
        uint32_t end = first + BATCH < sample ? first + BATCH : sample;
        uint64_t places[BATCH];
        for (uint32_t i = first; i < end; i++) {
            __builtin_prefetch(&nodes[order[i]], 1);
            __builtin_prefetch(slots + (size_t)order[i] * width);
        }
        for (uint32_t i = first; i < end; i++) {
            places[i - first] = home(slots + (size_t)order[i] * width);
            __builtin_prefetch(&cells[places[i - first]], 1);
        }
        for (uint32_t i = first; i < end; i++) {
            uint64_t place = places[i - first];
            while ((uint32_t)cells[place] != order[i] + 1) place = following(place);
            cells[place] = GIVEN_UP;
            nodes[order[i]] = (Node){GIVEN_UP, GIVEN_UP, 1};
        }
    }
    double took = now() - start;
    uint32_t left = 0;
    for (uint64_t place = 0; place < num_cells; place++)
        left += cells[place] && cells[place] != GIVEN_UP;
    check(left == num_blocks - sample, "other keys are left");
    /* The table as the look-ups want it. */
    prepare();
    insert(num_blocks - sample, num_blocks);
    return took;
}

static const struct { const char *name; double (*measure)(void); } FIGURES[] = {
    /* The first one fills the table. */
    {"insert_batch", insert_batch}, {"read_dependent", read_dependent},
    {"read_batch", read_batch}, {"probe", probe}, {"probe_batch", probe_batch},
    {"unlink_batch", unlink_batch}, {"evict_batch", evict_batch},
};
enum { NUM_FIGURES = sizeof FIGURES / sizeof *FIGURES };

static void allocate(int huge) {
    slots = map((size_t)num_blocks * width, huge);
    cells = map(num_cells * 8, huge);
    nodes = map(((size_t)num_blocks + 1) * sizeof(Node), huge);
    wanted = map((size_t)sample * width, huge);
    picked = map((size_t)sample * 4, huge);
    found = map((size_t)sample * 4, huge);
}

static void measure_all(int huge) {
    allocate(huge);
    for (int f = 0; f < NUM_FIGURES; f++) {
        double least = 0;
        for (int i = 0; i < REPEATS; i++) {
            double took = FIGURES[f].measure();
            if (i == 0 || took < least) least = took;
        }
        printf("%s\"%s\": %.2f", f ? ", " : "", FIGURES[f].name, least / sample);
    }
}

static void take_turns(void) {
    char line[64];
    allocate(1);
    insert_batch();
    while (fgets(line, sizeof line, stdin)) {
        int f = 0;
        line[strcspn(line, "\n")] = 0;
        while (f < NUM_FIGURES && strcmp(line, FIGURES[f].name)) f++;
        check(f < NUM_FIGURES, "no such figure");
        printf("%.3f\n", FIGURES[f].measure() / sample);
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    check(argc == 3 || (argc == 4 && !strcmp(argv[3], "turns")),
          "usage: floor NUM_BLOCKS WIDTH [turns]");
    num_blocks = (uint32_t)strtoul(argv[1], NULL, 10);
    width = (uint32_t)strtoul(argv[2], NULL, 10);
    check(num_blocks > BATCH && width >= 8 && width % 8 == 0, "bad size or width");
    num_cells = (uint64_t)num_blocks * 10 / 7 + 2;
    sample = num_blocks / 2 < SAMPLE ? num_blocks / 2 : SAMPLE;

    keys = map((size_t)num_blocks * width, 1);
    order = map((size_t)num_blocks * 4, 1);
    junk = map(FLUSH_BYTES, 1);
    for (size_t i = 0; i < (size_t)num_blocks * width; i += 8) {
        uint64_t word = random_word();
        memcpy(keys + i, &word, 8);
    }
    for (uint32_t i = 0; i < num_blocks; i++) order[i] = i;
    shuffle(order, num_blocks);
    if (argc == 4) {
        take_turns();
        return 0;
    }
    printf("{\"small_pages\": {");
    measure_all(0);
    printf("}, \"huge_pages\": {");
    measure_all(1);
    printf("}, \"ignore\": %d}\n", (int)(ignored & 1));
    return 0;
}
