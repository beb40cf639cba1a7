/* HotPath, and the module: the plain case of LOOKUP and RETRIEVE on the arrays of one region.
 *
 * Optional: dpu_app/regions/hot_path.py uses it where it was built. Whatever is not plain (an entry denied, a cold or
 * expired block, a scatter list, a range that does not fit, destinations that descend, a capsule that is malformed, no
 * room in the send queue) is left to the engine's general way, in Python, which decides everything; both are held to
 * the same answers by the same tests.
 */
#include "_hot_path.h"

/* ---- columns and objects ---- */

int column_open(struct column *column, PyObject *source, Py_ssize_t item_bytes, int writable, const char *name)
{
    if (PyObject_GetBuffer(source, &column->view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    column->count = column->view.len / item_bytes;
    if ((uintptr_t)column->view.buf % (uintptr_t)item_bytes || column->view.len % item_bytes) {
        PyErr_Format(PyExc_ValueError, "%s: not an aligned array of %zd-byte items", name, item_bytes);
        return -1; /* closed with its owner */
    }
    return 0;
}

void column_close(struct column *column)
{
    if (column->view.obj != NULL)
        PyBuffer_Release(&column->view);
}

PyObject *object_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords, initializer initialize)
{
    PyObject *self = type->tp_alloc(type, 0);
    if (self != NULL && initialize(self, arguments, keywords) < 0)
        Py_CLEAR(self);
    return self;
}

/* ---- Python's face ---- */

static PyObject *py_serve(HotPath *self, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer capsule;
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "serve(capsule, handles, open, lkey, room, counting, room_moved)");
        return NULL;
    }
    if (PyObject_GetBuffer(arguments[0], &capsule, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *answer = batch_serve(self, &capsule, arguments);
    PyBuffer_Release(&capsule);
    return answer;
}

static PyObject *number_list(const int64_t *numbers, uint32_t count)
{
    PyObject *list = PyList_New(count);
    for (uint32_t i = 0; list != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(numbers[i]);
        if (number == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}

/* find(entries, entry_bytes, handles): per entry the slot of its block, or -1, and the numbers of the entries that are
 * denied; None where the hash holds keys elsewhere. Expiry is the caller's. */
static PyObject *py_find(HotPath *self, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer entries, handles;
    struct keys keys;
    uint32_t denied[BATCH_MAX];
    int64_t slots[BATCH_MAX], numbers[BATCH_MAX];
    Py_ssize_t entry_bytes = count == 3 ? PyLong_AsSsize_t(arguments[1]) : 0;
    if (entry_bytes < KEY_ENTRY_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "find(entries, entry_bytes, handles)");
        return NULL;
    }
    if (PyDict_GET_SIZE(self->homeless))
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(arguments[0], &entries, PyBUF_SIMPLE) < 0)
        return NULL;
    if (entries.len > BATCH_MAX * entry_bytes || handles_open(arguments[2], &handles) < 0) {
        PyBuffer_Release(&entries);
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    uint32_t size = (uint32_t)(entries.len / entry_bytes);
    uint32_t refused = read_keys(entries.buf, entry_bytes, size, &handles, &keys, denied);
    keys_find(self->keys, &keys, size, slots);
    for (uint32_t i = 0; i < refused; i++) {
        slots[denied[i]] = NO_SLOT;
        numbers[i] = denied[i];
    }
    PyBuffer_Release(&handles);
    PyBuffer_Release(&entries);
    PyObject *found = number_list(slots, size), *without = number_list(numbers, refused), *answer = NULL;
    if (found != NULL && without != NULL)
        answer = PyTuple_Pack(2, found, without);
    Py_XDECREF(found);
    Py_XDECREF(without);
    return answer;
}

static int hot_path_columns(HotPath *self, PyObject *columns, PyObject *hits, PyObject *after_hit)
{
    PyObject *length, *checksum, *expires_s, *stats;
    if (!PyArg_ParseTuple(columns, "OOOO", &length, &checksum, &expires_s, &stats))
        return -1;
    if (column_open(&self->length, length, 4, 0, "length") < 0 ||
        column_open(&self->checksum, checksum, 8, 0, "checksum") < 0 ||
        column_open(&self->expires_s, expires_s, 4, 0, "expires_s") < 0 ||
        column_open(&self->stats, stats, 8, 1, "stats") < 0)
        return -1;
    Py_ssize_t slots = (Py_ssize_t)self->keys->slots;
    int sized = self->length.count == slots && self->checksum.count == slots && self->expires_s.count == slots &&
                self->stats.count >= STATS && self->frames->block_states.count > (Py_ssize_t)self->frames->frames;
    if (sized && self->on_hit == NULL) {
        if (column_open(&self->hits, hits, 1, 1, "hits") < 0 || column_open(&self->after_hit, after_hit, 1, 0, "") < 0)
            return -1;
        sized = self->hits.count == slots && self->after_hit.count == 256;
    }
    if (!sized)
        PyErr_SetString(PyExc_ValueError, "the columns are not of one region");
    return sized ? 0 : -1;
}

static int hot_path_init(HotPath *self, PyObject *arguments, PyObject *keywords)
{
    PyObject *keys, *frames, *homeless, *columns, *hits, *after_hit, *on_hit, *wall_ns;
    unsigned long long address, frame_bytes;
    PyObject *module = PyType_GetModule(Py_TYPE(self));
    PyObject *const *types = module == NULL ? NULL : PyModule_GetState(module);
    if (types == NULL || keywords != NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "HotPath takes plain arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!OOOOKK", types[0], &keys, types[1], &frames, &PyDict_Type, &homeless,
                          &PyTuple_Type, &columns, &hits, &after_hit, &on_hit, &wall_ns, &address, &frame_bytes))
        return -1;
    self->keys = (KeyTable *)Py_NewRef(keys);
    self->frames = (Frames *)Py_NewRef(frames);
    self->homeless = Py_NewRef(homeless);
    self->on_hit = on_hit == Py_None ? NULL : Py_NewRef(on_hit);
    self->wall_ns = Py_NewRef(wall_ns);
    self->window_address = address;
    self->frame_bytes = frame_bytes;
    return hot_path_columns(self, columns, hits, after_hit);
}

static PyObject *hot_path_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    return object_new(type, arguments, keywords, (initializer)hot_path_init);
}

static int hot_path_traverse(HotPath *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->homeless);
    Py_VISIT(self->on_hit);
    Py_VISIT(self->wall_ns);
    return 0;
}

static void hot_path_free(HotPath *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    column_close(&self->length);
    column_close(&self->checksum);
    column_close(&self->expires_s);
    column_close(&self->stats);
    column_close(&self->hits);
    column_close(&self->after_hit);
    Py_XDECREF(self->keys);
    Py_XDECREF(self->frames);
    Py_XDECREF(self->homeless);
    Py_XDECREF(self->on_hit);
    Py_XDECREF(self->wall_ns);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"serve", (PyCFunction)(void (*)(void))py_serve, METH_FASTCALL,
     "serve(capsule, handles, open, lkey, room, counting, room_moved): (response, RDMA requests, frames held, bytes moved)"
     " or None"},
    {"find", (PyCFunction)(void (*)(void))py_find, METH_FASTCALL,
     "find(entries, entry_bytes, handles): (slots, denied) or None"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, hot_path_new},
    {Py_tp_dealloc, hot_path_free},
    {Py_tp_traverse, hot_path_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec hot_path_spec = {
    "dpu_app.regions._hot_path.HotPath", sizeof(HotPath), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

/* The module's state: the types that HotPath takes. */
struct types {
    PyObject *key_table, *frames;
};

static int add_type(PyObject *module, PyType_Spec *spec, PyObject **kept)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL)
        return -1;
    if (kept != NULL)
        *kept = Py_NewRef(type);
    int added = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return added;
}

static int execute(PyObject *module)
{
    struct types *types = PyModule_GetState(module);
    if (add_type(module, &key_table_spec, &types->key_table) < 0 ||
        add_type(module, &frames_spec, &types->frames) < 0)
        return -1;
    return add_type(module, &hot_path_spec, NULL);
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    struct types *types = PyModule_GetState(module);
    Py_VISIT(types->key_table);
    Py_VISIT(types->frames);
    return 0;
}

static int clear(PyObject *module)
{
    struct types *types = PyModule_GetState(module);
    Py_CLEAR(types->key_table);
    Py_CLEAR(types->frames);
    return 0;
}

static struct PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_hot_path", NULL, sizeof(struct types), NULL, module_slots, traverse, clear, NULL,
};

PyMODINIT_FUNC PyInit__hot_path(void)
{
    return PyModuleDef_Init(&module);
}
