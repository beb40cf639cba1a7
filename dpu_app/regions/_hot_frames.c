/* Frames: which frame holds a slot's block, and the frames' references and order of use.
 *
 * To Python it is a mapping from slot to frame that stands in for a dict (window.py); the arrays are the window's. Open
 * addressing with linear probing, at most half full, no tombstones.
 */
#include "_hot_path.h"

#define EMPTY UINT32_MAX

static uint32_t home_of(const Frames *f, uint32_t slot)
{
    return (uint32_t)(slot * 0x9E3779B1u) >> f->shift;
}

/* Where `slot` is, or the empty place where it would be. */
static uint32_t place_of(const Frames *f, uint32_t slot)
{
    uint32_t place = home_of(f, slot);
    while (f->keys[place] != slot && f->keys[place] != EMPTY)
        place = (place + 1) & f->mask;
    return place;
}

int32_t frames_get(const Frames *f, uint32_t slot)
{
    if (slot == EMPTY)
        return NO_FRAME;
    uint32_t place = place_of(f, slot);
    return f->keys[place] == slot ? f->values[place] : NO_FRAME;
}

static void forget(Frames *f, uint32_t place)
{
    uint32_t next = place;
    for (;;) { /* close the gap: whatever probes past it moves back */
        next = (next + 1) & f->mask;
        if (f->keys[next] == EMPTY)
            break;
        uint32_t home = home_of(f, f->keys[next]);
        if (((next - home) & f->mask) >= ((next - place) & f->mask)) {
            f->keys[place] = f->keys[next];
            f->values[place] = f->values[next];
            place = next;
        }
    }
    f->keys[place] = EMPTY;
    f->used--;
}

/* links: next and previous of each frame and of a sentinel after them, as eviction/slot_queue.py has them. */
void frames_touch(Frames *f, uint32_t frame)
{
    if (((const uint8_t *)f->states.view.buf)[frame] != FRAME_CLEAN)
        return;
    uint32_t *links = f->links.view.buf;
    uint32_t sentinel = f->frames;
    uint32_t older = links[2 * frame], newer = links[2 * frame + 1];
    if (older > sentinel || newer > sentinel)
        return;
    links[2 * newer] = older;
    links[2 * older + 1] = newer;
    uint32_t old = links[2 * sentinel];
    links[2 * frame] = old;
    links[2 * frame + 1] = sentinel;
    links[2 * old + 1] = frame;
    links[2 * sentinel] = frame;
}

/* ---- Python's face ---- */

/* 0: `key` is no slot at all. -1: an error. */
static int slot_of(PyObject *key, uint32_t *slot)
{
    long long number = PyLong_AsLongLong(key);
    if (number == -1 && PyErr_Occurred())
        return -1;
    *slot = (uint32_t)number;
    return number >= 0 && number < EMPTY;
}

static PyObject *py_get(Frames *self, PyObject *const *arguments, Py_ssize_t count)
{
    uint32_t slot;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "get(slot, default)");
        return NULL;
    }
    int known = slot_of(arguments[0], &slot);
    if (known < 0)
        return NULL;
    int32_t frame = known ? frames_get(self, slot) : NO_FRAME;
    if (frame >= 0)
        return PyLong_FromLong(frame);
    Py_INCREF(arguments[1]);
    return arguments[1];
}

static Py_ssize_t frames_length(PyObject *object)
{
    return ((Frames *)object)->used;
}

static PyObject *frames_item(PyObject *object, PyObject *key)
{
    uint32_t slot;
    int known = slot_of(key, &slot);
    if (known < 0)
        return NULL;
    int32_t frame = known ? frames_get((Frames *)object, slot) : NO_FRAME;
    if (frame >= 0)
        return PyLong_FromLong(frame);
    PyErr_SetObject(PyExc_KeyError, key);
    return NULL;
}

static int frames_assign(PyObject *object, PyObject *key, PyObject *value)
{
    Frames *self = (Frames *)object;
    uint32_t slot;
    int known = slot_of(key, &slot);
    if (known < 0)
        return -1;
    uint32_t place = known ? place_of(self, slot) : 0;
    int held = known && self->keys[place] == slot;
    if (value == NULL) {
        if (!held) {
            PyErr_SetObject(PyExc_KeyError, key);
            return -1;
        }
        forget(self, place);
        return 0;
    }
    long frame = PyLong_AsLong(value);
    if (frame == -1 && PyErr_Occurred())
        return -1;
    if (!known || frame < 0 || frame >= (long)self->frames || (!held && self->used >= self->frames)) {
        PyErr_SetString(PyExc_ValueError, "no such slot or frame, or more blocks than frames");
        return -1;
    }
    if (!held)
        self->used++;
    self->keys[place] = slot;
    self->values[place] = (int32_t)frame;
    return 0;
}

static int frames_contains(PyObject *object, PyObject *key)
{
    uint32_t slot;
    int known = slot_of(key, &slot);
    return known <= 0 ? known : frames_get((Frames *)object, slot) >= 0;
}

static PyObject *py_touch(Frames *self, PyObject *number)
{
    long frame = PyLong_AsLong(number);
    if (frame == -1 && PyErr_Occurred())
        return NULL;
    if (frame < 0 || frame >= (long)self->frames) {
        PyErr_SetString(PyExc_IndexError, "no such frame");
        return NULL;
    }
    frames_touch(self, (uint32_t)frame);
    Py_RETURN_NONE;
}

/* unhold(frames as packed u32): one reference less on each; the DOOMED ones that nobody references any more, for the
 * caller to free. Raises ValueError, having changed nothing of the rest, for a frame that is not held. */
static PyObject *py_unhold(Frames *self, PyObject *packed)
{
    Py_buffer view;
    if (PyObject_GetBuffer(packed, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *freed = PyList_New(0);
    uint32_t *references = self->references.view.buf;
    for (Py_ssize_t at = 0; freed != NULL && at + 4 <= view.len; at += 4) {
        uint32_t frame;
        memcpy(&frame, (const char *)view.buf + at, 4);
        if (frame >= self->frames || references[frame] == 0) {
            PyErr_Format(PyExc_ValueError, "frame %u released more often than held", frame);
            Py_CLEAR(freed);
        } else if (--references[frame] == 0 && ((const uint8_t *)self->states.view.buf)[frame] == FRAME_DOOMED) {
            PyObject *number = PyLong_FromUnsignedLong(frame);
            if (number == NULL || PyList_Append(freed, number) < 0)
                Py_CLEAR(freed);
            Py_XDECREF(number);
        }
    }
    PyBuffer_Release(&view);
    return freed;
}

static int frames_init(Frames *self, PyObject *arguments, PyObject *keywords)
{
    PyObject *references, *states, *block_states, *links;
    if (keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "Frames takes four plain arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "OOOO", &references, &states, &block_states, &links))
        return -1;
    if (column_open(&self->references, references, 4, 1, "references") < 0 ||
        column_open(&self->states, states, 1, 0, "states") < 0 ||
        column_open(&self->block_states, block_states, 1, 0, "block states") < 0 ||
        column_open(&self->links, links, 4, 1, "links") < 0)
        return -1;
    Py_ssize_t frames = self->references.count;
    if (frames < 1 || frames > (1 << 30) || self->states.count != frames || self->block_states.count < frames ||
        self->links.count < 2 * (frames + 1)) {
        PyErr_SetString(PyExc_ValueError, "the arrays are not of one window");
        return -1;
    }
    uint8_t bits = 4;
    while (((Py_ssize_t)1 << bits) < 2 * frames)
        bits++;
    size_t places = (size_t)1 << bits;
    self->frames = (uint32_t)frames;
    self->mask = (uint32_t)(places - 1);
    self->shift = (uint8_t)(32 - bits);
    self->keys = PyMem_Malloc(places * sizeof *self->keys);
    self->values = PyMem_Calloc(places, sizeof *self->values);
    if (self->keys == NULL || self->values == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(self->keys, 0xFF, places * sizeof *self->keys);
    return 0;
}

static PyObject *frames_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    return object_new(type, arguments, keywords, (initializer)frames_init);
}

static void frames_free(Frames *self)
{
    PyTypeObject *type = Py_TYPE(self);
    column_close(&self->references);
    column_close(&self->states);
    column_close(&self->block_states);
    column_close(&self->links);
    PyMem_Free(self->keys);
    PyMem_Free(self->values);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"get", (PyCFunction)(void (*)(void))py_get, METH_FASTCALL, "get(slot, default)"},
    {"touch", (PyCFunction)py_touch, METH_O, "touch(frame): it was used now, if it is clean"},
    {"unhold", (PyCFunction)py_unhold, METH_O, "unhold(packed): the frames that are free now"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, frames_new},
    {Py_tp_dealloc, frames_free},
    {Py_tp_methods, methods},
    {Py_mp_length, frames_length},
    {Py_mp_subscript, frames_item},
    {Py_mp_ass_subscript, frames_assign},
    {Py_sq_contains, frames_contains},
    {0, NULL},
};

PyType_Spec frames_spec = {
    "dpu_app.regions._hot_path.Frames", sizeof(Frames), 0, Py_TPFLAGS_DEFAULT, slots,
};
