/* The inner loops of opening a region: slot-table entries into the index's columns, and from there into its hash.
 *
 * Optional: dpu_app/regions/native_load.py uses it where it was built, and table_reader.py with bulk_load.py do the
 * same in numpy where it was not, under the same tests. It handles chunks in which every entry is unused or valid,
 * unexpired and of a known namespace; any other chunk is left untouched for the numpy code. Little-endian only.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define ENTRY_WORDS 8
#define LANES 8
#define NAMESPACE_SHIFT 52
#define CHUNK_MAX 4096
#define AHEAD 16 /* slots whose cache lines are on their way: the hash is larger than the cache */
#define NAMESPACE_FACTOR 0x9E3779B97F4A7C15ull

static const uint64_t FACTORS[ENTRY_WORDS] = {
    0xBF58476D1CE4E5B9ull, 0x94D049BB133111EBull, 0xD6E8FEB86659FD93ull, 0xA0761D6478BD642Full,
    0xE7037ED1A0B428DBull, 0x8EBC6AF09C88C6E3ull, 0x589965CC75374CC3ull, 0x1D8E4E27C47D124Full,
};

/* As native_load.py lays it out: addresses and numbers, 8 bytes each. */
struct context {
    uint64_t *key_lo, *key_hi, *checksum;
    uint32_t *length, *generation, *stored_s, *expires_s;
    uint16_t *namespace_id;
    uint8_t *flags;
    uint32_t *cells;
    uint8_t *tags, *fill;
    uint64_t buckets, hash_salt_lo, hash_salt_hi, entry_salt, slots, now_s;
    const uint16_t *known_ids;
    const uint64_t *known_lo, *known_hi;
    int64_t *totals;
};

/* What the first half says: slots filled, newest generation. */
struct outcome {
    uint64_t used, newest_generation;
};

static uint32_t entry_check(const uint64_t *words, uint64_t slot, uint64_t salt)
{
    uint64_t state = slot * 0x9E3779B97F4A7C15ull ^ salt;
    for (int i = 0; i < ENTRY_WORDS; i++) {
        state ^= i == ENTRY_WORDS - 1 ? words[i] & 0xFFFFFFFFull : words[i];
        state *= FACTORS[i];
        state ^= state >> 29;
    }
    return (uint32_t)(state >> 32);
}

static uint64_t namespace_place(const uint64_t *words)
{
    return words[2] * NAMESPACE_FACTOR >> NAMESPACE_SHIFT;
}

static int is_unused(const uint64_t *words)
{
    uint64_t any = 0;
    for (int i = 0; i < ENTRY_WORDS; i++)
        any |= words[i];
    return any == 0;
}

static int is_plain(const struct context *c, const uint64_t *words, uint64_t slot)
{
    uint64_t expires_s = words[6] >> 32;
    uint64_t place = namespace_place(words);
    return slot < c->slots && (uint32_t)words[7] == 1 && words[7] >> 32 == entry_check(words, slot, c->entry_salt) &&
           (expires_s == 0 || expires_s > c->now_s) && c->known_lo[place] == words[2] && c->known_hi[place] == words[3];
}

static uint64_t key_hash(const struct context *c, uint64_t lo, uint64_t hi, uint64_t namespace_id)
{
    uint64_t state = (lo ^ c->hash_salt_lo) * 0x9E3779B97F4A7C15ull;
    state ^= state >> 32;
    state = (state + (hi ^ c->hash_salt_hi) + namespace_id * 0xA0761D6478BD642Full) * 0xD6E8FEB86659FD93ull;
    state ^= state >> 29;
    state *= 0xBF58476D1CE4E5B9ull;
    return state ^ state >> 32;
}

/* 1: placed. 0: the bucket is full. -1: a slot with the same key is there. */
static int place(const struct context *c, uint64_t slot, uint8_t tag, uint64_t bucket)
{
    uint8_t *tags = c->tags + bucket * LANES;
    uint8_t fill = c->fill[bucket];
    for (uint8_t lane = 0; lane < fill; lane++) {
        if (tags[lane] == tag) {
            uint32_t other = c->cells[bucket * LANES + lane];
            if (c->key_lo[other] == c->key_lo[slot] && c->key_hi[other] == c->key_hi[slot] &&
                c->namespace_id[other] == c->namespace_id[slot])
                return -1;
        }
    }
    if (fill == LANES)
        return 0;
    c->cells[bucket * LANES + fill] = (uint32_t)slot;
    tags[fill] = tag;
    c->fill[bucket] = fill + 1;
    return 1;
}

static void fill_columns(const struct context *c, const uint64_t *entry, uint64_t slot, uint16_t namespace_id)
{
    c->key_lo[slot] = entry[0];
    c->key_hi[slot] = entry[1];
    c->namespace_id[slot] = namespace_id;
    c->length[slot] = (uint32_t)entry[4];
    c->generation[slot] = (uint32_t)(entry[4] >> 32);
    c->checksum[slot] = entry[5];
    c->stored_s[slot] = (uint32_t)entry[6];
    c->expires_s[slot] = (uint32_t)(entry[6] >> 32);
    c->flags[slot] = 1;
    c->totals[namespace_id] += (uint32_t)entry[4];
}

static uint64_t first_bucket(const struct context *c, uint64_t hashed)
{
    return (hashed & 0xFFFFFFFFull) * c->buckets >> 32;
}

static void prefetch(const struct context *c, uint64_t hashed)
{
    uint64_t bucket = first_bucket(c, hashed);
    __builtin_prefetch(c->fill + bucket, 1);
    __builtin_prefetch(c->tags + bucket * LANES, 1);
    __builtin_prefetch(c->cells + bucket * LANES, 1);
}

/* First half: one chunk of at most CHUNK_MAX entries into the columns. 0, and nothing is changed, unless every entry is
 * unused or plain. `slots` and `hashes` have room for `count`, and take the slots filled and the hashes of their keys. */
int entresol_load_columns(const struct context *c, const uint64_t *words, uint64_t count, uint64_t first_slot,
                          uint32_t *slots, uint64_t *hashes, struct outcome *out)
{
    uint64_t used = 0;
    if (count > CHUNK_MAX)
        return 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t *entry = words + i * ENTRY_WORDS;
        if (!is_unused(entry) && !is_plain(c, entry, first_slot + i))
            return 0;
    }
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t *entry = words + i * ENTRY_WORDS;
        if (is_unused(entry))
            continue;
        uint16_t namespace_id = c->known_ids[namespace_place(entry)];
        fill_columns(c, entry, first_slot + i, namespace_id);
        if (entry[4] >> 32 > out->newest_generation)
            out->newest_generation = entry[4] >> 32;
        slots[used] = (uint32_t)(first_slot + i);
        hashes[used++] = key_hash(c, entry[0], entry[1], namespace_id);
    }
    out->used = used;
    return 1;
}

/* Second half: `count` slots whose columns are filled, into the hash. How many were put into `homeless`, which has room
 * for all of them, instead. May run beside the first half of later slots: those are not in the hash yet. */
uint64_t entresol_load_hash(const struct context *c, const uint32_t *slots, const uint64_t *hashes, uint64_t count,
                            int64_t *homeless)
{
    uint64_t left = 0;
    for (uint64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            prefetch(c, hashes[i + AHEAD]);
        uint64_t hashed = hashes[i];
        uint8_t tag = (uint8_t)(hashed * 0xA0761D6478BD642Full >> 56);
        if (tag == 0)
            tag = 1;
        int placed = place(c, slots[i], tag, first_bucket(c, hashed));
        if (placed == 0)
            placed = place(c, slots[i], tag, (hashed >> 32) * c->buckets >> 32);
        if (placed != 1)
            homeless[left++] = slots[i];
    }
    return left;
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_table_load", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__table_load(void)
{
    return PyModule_Create(&module);
}
