/* Regions: what is registered in one protection domain, for checks of local memory; see _shm_channel.c. */
#include "_shm_channel.h"

static Row *home(const Regions *self, uint32_t lkey)
{
    uint32_t at = lkey & self->mask;
    while (self->rows[at].lkey != 0 && self->rows[at].lkey != lkey)
        at = (at + 1) & self->mask;
    return &self->rows[at];
}

int shm_is_local(const Regions *self, uint32_t lkey, uint64_t address, uint64_t length, int writable)
{
    const Row *row = home(self, lkey);
    return lkey != 0 && row->lkey == lkey && address >= row->address && address <= row->end &&
           length <= row->end - address && (!writable || row->can_write);
}

static int resize(Regions *self, uint32_t size)
{
    Row *old = self->rows, *rows = PyMem_Calloc(size, sizeof(Row));
    uint32_t old_size = old == NULL ? 0 : self->mask + 1;
    if (rows == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    self->rows = rows;
    self->mask = size - 1;
    for (uint32_t at = 0; at < old_size; at++)
        if (old[at].lkey != 0)
            *home(self, old[at].lkey) = old[at];
    PyMem_Free(old);
    return 1;
}

static PyObject *regions_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, "") || (kwargs != NULL && PyDict_GET_SIZE(kwargs) != 0))
        return NULL;
    Regions *self = (Regions *)type->tp_alloc(type, 0);
    if (self != NULL && !resize(self, 16)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void regions_dealloc(Regions *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyMem_Free(self->rows);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *regions_add(Regions *self, PyObject *args)
{
    unsigned int lkey;
    unsigned long long address, length;
    int can_write;
    if (!PyArg_ParseTuple(args, "IKKp", &lkey, &address, &length, &can_write))
        return NULL;
    if (lkey == 0 || address > UINT64_MAX - length)
        return PyErr_Format(PyExc_ValueError, "no region: key %u, 0x%llx+%llu", lkey, address, length);
    if (2 * (self->used + 1) > self->mask && !resize(self, 2 * (self->mask + 1)))
        return NULL;
    Row *row = home(self, lkey);
    self->used += row->lkey == 0;
    *row = (Row){address, address + length, lkey, can_write};
    Py_RETURN_NONE;
}

static PyObject *regions_remove(Regions *self, PyObject *argument)
{
    uint32_t lkey = (uint32_t)PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred())
        return NULL;
    Row *row = home(self, lkey);
    if (lkey == 0 || row->lkey != lkey)
        Py_RETURN_NONE;
    row->lkey = 0;
    self->used--;
    /* What was pushed past the hole moves into it, so that a search may stop at an empty place. */
    for (uint32_t at = ((uint32_t)(row - self->rows) + 1) & self->mask; self->rows[at].lkey != 0;
         at = (at + 1) & self->mask) {
        Row moved = self->rows[at];
        self->rows[at].lkey = 0;
        *home(self, moved.lkey) = moved;
    }
    Py_RETURN_NONE;
}

static PyMethodDef regions_methods[] = {
    {"add", (PyCFunction)regions_add, METH_VARARGS, "add(lkey, address, length_bytes, can_write)"},
    {"remove", (PyCFunction)regions_remove, METH_O, "remove(lkey)"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot regions_slots[] = {
    {Py_tp_doc, "The registered regions of one protection domain, by lkey."},
    {Py_tp_new, regions_new},
    {Py_tp_dealloc, regions_dealloc},
    {Py_tp_methods, regions_methods},
    {0, NULL},
};

PyType_Spec shm_regions_spec = {
    .name = "emulator._shm_channel.Regions",
    .basicsize = sizeof(Regions),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = regions_slots,
};
