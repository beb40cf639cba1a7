/* KeyTable: look-ups, insertions and removals in the buckets of key_hash.py, which owns them and says how they work.
 *
 * Many keys are looked up in stages, each of which asks for the next one's cache lines: a large index is not in cache.
 */
#include "_hot_path.h"

#define LANES 8
#define GROUP 32 /* keys whose cache lines are on their way at a time */
#define K1 0x9E3779B97F4A7C15ull
#define K2 0xD6E8FEB86659FD93ull
#define K3 0xBF58476D1CE4E5B9ull
#define K4 0xA0761D6478BD642Full

struct places {
    uint8_t tag;
    uint64_t first, second; /* buckets */
};

static uint64_t hash_of(const KeyTable *t, uint64_t lo, uint64_t hi, uint64_t namespace_id)
{
    uint64_t state = (lo ^ t->salt_lo) * K1;
    state ^= state >> 32;
    state = (state + (hi ^ t->salt_hi) + namespace_id * K4) * K2;
    state ^= state >> 29;
    state *= K3;
    return state ^ state >> 32;
}

static struct places places_of(const KeyTable *t, uint64_t hashed)
{
    struct places places;
    places.tag = (uint8_t)(hashed * K4 >> 56);
    if (places.tag == 0)
        places.tag = 1;
    places.first = (hashed & 0xFFFFFFFFull) * t->buckets >> 32;
    places.second = (hashed >> 32) * t->buckets >> 32;
    return places;
}

/* The top bit of each byte of `bucket` that equals `tag`. */
static uint64_t matches(const KeyTable *t, uint64_t bucket, uint8_t tag)
{
    const uint64_t low = 0x7F7F7F7F7F7F7F7Full;
    uint64_t lanes;
    memcpy(&lanes, (const uint8_t *)t->tags.view.buf + bucket * LANES, LANES);
    lanes ^= tag * 0x0101010101010101ull;
    return ~(((lanes & low) + low) | lanes | low);
}

static int64_t lane_of(uint64_t match)
{
    return __builtin_ctzll(match) >> 3;
}

static const uint32_t *cells_of(const KeyTable *t)
{
    return t->cells.view.buf;
}

static int holds(const KeyTable *t, uint64_t slot, uint64_t lo, uint64_t hi, uint16_t namespace_id)
{
    return slot < t->slots && ((const uint64_t *)t->key_lo.view.buf)[slot] == lo &&
           ((const uint64_t *)t->key_hi.view.buf)[slot] == hi &&
           ((const uint16_t *)t->namespaces.view.buf)[slot] == namespace_id;
}

/* The cell of a key, or -1; `match` are the candidates of `bucket`. */
static int64_t cell_in(const KeyTable *t, uint64_t bucket, uint64_t match, uint64_t lo, uint64_t hi, uint16_t id)
{
    for (; match; match &= match - 1) {
        int64_t cell = (int64_t)(bucket * LANES) + lane_of(match);
        if (holds(t, cells_of(t)[cell], lo, hi, id))
            return cell;
    }
    return -1;
}

static int64_t cell_of(const KeyTable *t, uint64_t lo, uint64_t hi, uint16_t id)
{
    struct places p = places_of(t, hash_of(t, lo, hi, id));
    int64_t cell = cell_in(t, p.first, matches(t, p.first, p.tag), lo, hi, id);
    return cell >= 0 ? cell : cell_in(t, p.second, matches(t, p.second, p.tag), lo, hi, id);
}

static void prefetch_bucket(const KeyTable *t, uint64_t bucket)
{
    __builtin_prefetch((const uint8_t *)t->tags.view.buf + bucket * LANES);
    __builtin_prefetch(cells_of(t) + bucket * LANES);
}

static void prefetch_columns(const KeyTable *t, uint64_t bucket, uint64_t match)
{
    uint64_t slot = cells_of(t)[bucket * LANES + (uint64_t)lane_of(match)];
    if (slot < t->slots) {
        __builtin_prefetch((const uint64_t *)t->key_lo.view.buf + slot);
        __builtin_prefetch((const uint64_t *)t->key_hi.view.buf + slot);
        __builtin_prefetch((const uint16_t *)t->namespaces.view.buf + slot);
    }
}

void keys_find(const KeyTable *t, const struct keys *keys, uint32_t count, int64_t *slots)
{
    struct places places[GROUP];
    uint64_t first[GROUP], second[GROUP];
    for (uint32_t start = 0; start < count; start += GROUP) {
        uint32_t size = count - start < GROUP ? count - start : GROUP;
        for (uint32_t i = 0; i < size; i++) {
            uint32_t k = start + i;
            places[i] = places_of(t, hash_of(t, keys->lo[k], keys->hi[k], keys->namespace_id[k]));
            prefetch_bucket(t, places[i].first);
            prefetch_bucket(t, places[i].second);
        }
        for (uint32_t i = 0; i < size; i++) {
            first[i] = matches(t, places[i].first, places[i].tag);
            second[i] = matches(t, places[i].second, places[i].tag);
            if (first[i])
                prefetch_columns(t, places[i].first, first[i]);
            if (second[i])
                prefetch_columns(t, places[i].second, second[i]);
        }
        for (uint32_t i = 0; i < size; i++) {
            uint32_t k = start + i;
            uint64_t lo = keys->lo[k], hi = keys->hi[k];
            int64_t cell = cell_in(t, places[i].first, first[i], lo, hi, keys->namespace_id[k]);
            if (cell < 0)
                cell = cell_in(t, places[i].second, second[i], lo, hi, keys->namespace_id[k]);
            slots[k] = cell < 0 ? NO_SLOT : (int64_t)cells_of(t)[cell];
        }
    }
}

/* ---- Python's face ---- */

static int numbers(PyObject *const *arguments, Py_ssize_t count, Py_ssize_t expected, uint64_t *out)
{
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", expected, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = PyLong_AsUnsignedLongLong(arguments[i]);
        if (out[i] == UINT64_MAX && PyErr_Occurred())
            return -1;
    }
    if (out[count - 1] > UINT16_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a namespace id is 16 bits");
        return -1;
    }
    return 0;
}

static PyObject *py_hash_one(KeyTable *self, PyObject *const *arguments, Py_ssize_t count)
{
    uint64_t n[3];
    if (numbers(arguments, count, 3, n) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(hash_of(self, n[0], n[1], n[2]));
}

static PyObject *py_find_one(KeyTable *self, PyObject *const *arguments, Py_ssize_t count)
{
    uint64_t n[3];
    long namespace_id = count == 3 ? PyLong_AsLong(arguments[2]) : 0;
    if (namespace_id < 0 && !PyErr_Occurred())
        return PyLong_FromLong(NO_SLOT); /* one that was never given out */
    if (PyErr_Occurred() || numbers(arguments, count, 3, n) < 0)
        return NULL;
    int64_t cell = cell_of(self, n[0], n[1], (uint16_t)n[2]);
    return PyLong_FromLongLong(cell < 0 ? NO_SLOT : (int64_t)cells_of(self)[cell]);
}

/* insert(slot, key_lo, key_hi, namespace): False, and nothing is changed, where both buckets are full. */
static PyObject *py_insert(KeyTable *self, PyObject *const *arguments, Py_ssize_t count)
{
    uint64_t n[4];
    if (numbers(arguments, count, 4, n) < 0)
        return NULL;
    if (n[0] >= self->slots) {
        PyErr_SetString(PyExc_IndexError, "no such slot");
        return NULL;
    }
    struct places p = places_of(self, hash_of(self, n[1], n[2], n[3]));
    uint64_t bucket = p.first, empty = matches(self, p.first, 0);
    if (!empty) {
        bucket = p.second;
        empty = matches(self, p.second, 0);
    }
    if (!empty)
        Py_RETURN_FALSE;
    uint64_t cell = bucket * LANES + (uint64_t)lane_of(empty);
    ((uint8_t *)self->tags.view.buf)[cell] = p.tag;
    ((uint32_t *)self->cells.view.buf)[cell] = (uint32_t)n[0];
    Py_RETURN_TRUE;
}

/* remove(slot, key_lo, key_hi, namespace): False, and nothing is changed, where `slot` is not under this key. */
static PyObject *py_remove(KeyTable *self, PyObject *const *arguments, Py_ssize_t count)
{
    uint64_t n[4];
    if (numbers(arguments, count, 4, n) < 0)
        return NULL;
    int64_t cell = cell_of(self, n[1], n[2], (uint16_t)n[3]);
    if (cell < 0 || cells_of(self)[cell] != n[0])
        Py_RETURN_FALSE;
    ((uint8_t *)self->tags.view.buf)[cell] = 0;
    Py_RETURN_TRUE;
}

static int key_table_init(KeyTable *self, PyObject *arguments, PyObject *keywords)
{
    PyObject *cells, *tags, *lo, *hi, *namespaces;
    unsigned long long salt_lo, salt_hi;
    if (keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "KeyTable takes seven plain arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "OOOOOKK", &cells, &tags, &lo, &hi, &namespaces, &salt_lo, &salt_hi))
        return -1;
    if (column_open(&self->cells, cells, 4, 1, "cells") < 0 || column_open(&self->tags, tags, 1, 1, "tags") < 0 ||
        column_open(&self->key_lo, lo, 8, 0, "key_lo") < 0 || column_open(&self->key_hi, hi, 8, 0, "key_hi") < 0 ||
        column_open(&self->namespaces, namespaces, 2, 0, "namespace") < 0)
        return -1;
    self->buckets = (uint64_t)self->cells.count / LANES;
    self->slots = (uint64_t)self->key_lo.count;
    self->salt_lo = salt_lo;
    self->salt_hi = salt_hi;
    if (self->buckets == 0 || self->buckets > UINT32_MAX || (uint64_t)self->tags.count < self->buckets * LANES ||
        self->key_hi.count != self->key_lo.count || self->namespaces.count != self->key_lo.count) {
        PyErr_SetString(PyExc_ValueError, "the columns are not of one index");
        return -1;
    }
    return 0;
}

static PyObject *key_table_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    return object_new(type, arguments, keywords, (initializer)key_table_init);
}

static void key_table_free(KeyTable *self)
{
    PyTypeObject *type = Py_TYPE(self);
    column_close(&self->cells);
    column_close(&self->tags);
    column_close(&self->key_lo);
    column_close(&self->key_hi);
    column_close(&self->namespaces);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"hash_one", (PyCFunction)(void (*)(void))py_hash_one, METH_FASTCALL, "hash_one(key_lo, key_hi, namespace)"},
    {"find_one", (PyCFunction)(void (*)(void))py_find_one, METH_FASTCALL, "find_one(key_lo, key_hi, namespace)"},
    {"insert", (PyCFunction)(void (*)(void))py_insert, METH_FASTCALL, "insert(slot, key_lo, key_hi, namespace)"},
    {"remove", (PyCFunction)(void (*)(void))py_remove, METH_FASTCALL, "remove(slot, key_lo, key_hi, namespace)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, key_table_new},
    {Py_tp_dealloc, key_table_free},
    {Py_tp_methods, methods},
    {0, NULL},
};

PyType_Spec key_table_spec = {
    "dpu_app.regions._hot_path.KeyTable", sizeof(KeyTable), 0, Py_TPFLAGS_DEFAULT, slots,
};
