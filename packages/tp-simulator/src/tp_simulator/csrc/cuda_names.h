// Devices under the name of CUDA's: in Python, "cuda" makes one, and each says that it is one.
//
// torch's parser of names is its own, and knows "cuda" as something else. What Python makes of a name, and what it
// reads of a device, goes through slots of torch's types, which are replaced here.
#pragma once
#include <Python.h>

#include <cstring>
#include <map>

namespace sim {

inline auto& makers = *new std::map<PyTypeObject*, newfunc>;  // torch's own
inline reprfunc repr_of_device = nullptr;
inline reprfunc str_of_device = nullptr;
inline PyObject* type_of_device = nullptr;  // the attribute `type`, as torch has it

// A value with "sim" for "cuda", where it is the name of a device. A new reference.
inline PyObject* in_own_name(PyObject* value) {
  const char* text = PyUnicode_Check(value) ? PyUnicode_AsUTF8(value) : nullptr;
  bool is_name = text && std::strncmp(text, "cuda", 4) == 0 && (text[4] == 0 || text[4] == ':');
  if (is_name) return PyUnicode_FromFormat("sim%s", text + 4);
  Py_INCREF(value);
  return value;
}

inline PyObject* make_in_own_name(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  auto* known = type;
  while (!makers.count(known)) known = known->tp_base;
  auto* renamed = PyTuple_New(PyTuple_Size(args));
  for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++)
    PyTuple_SET_ITEM(renamed, i, in_own_name(PyTuple_GET_ITEM(args, i)));
  auto* named = kwargs ? PyDict_New() : nullptr;
  PyObject *key, *value;
  for (Py_ssize_t i = 0; kwargs && PyDict_Next(kwargs, &i, &key, &value);) {
    auto* fresh = in_own_name(value);
    PyDict_SetItem(named, key, fresh);
    Py_DECREF(fresh);
  }
  auto* made = makers[known](type, renamed, named);
  Py_DECREF(renamed);
  Py_XDECREF(named);
  return made;
}

// A text with "cuda" for "sim"; takes the reference.
inline PyObject* in_cudas_name(PyObject* text) {
  if (!text) return nullptr;
  auto* renamed = PyObject_CallMethod(text, "replace", "ss", "sim", "cuda");
  Py_DECREF(text);
  return renamed;
}

inline PyObject* get_type(PyObject* device, void*) {
  return in_cudas_name(Py_TYPE(type_of_device)->tp_descr_get(type_of_device, device, (PyObject*)Py_TYPE(device)));
}

inline void make_by_name(PyTypeObject* type) {
  makers[type] = type->tp_new;
  type->tp_new = make_in_own_name;
  PyType_Modified(type);
}

inline void say_cuda(PyTypeObject* device) {
  static PyGetSetDef type{"type", get_type, nullptr, nullptr, nullptr};
  auto* names = device->tp_dict;
  type_of_device = PyDict_GetItemString(names, "type");
  Py_INCREF(type_of_device);
  auto* renamed = PyDescr_NewGetSet(device, &type);
  PyDict_SetItemString(names, "type", renamed);
  Py_DECREF(renamed);
  repr_of_device = device->tp_repr;
  str_of_device = device->tp_str;
  device->tp_repr = [](PyObject* self) { return in_cudas_name(repr_of_device(self)); };
  device->tp_str = [](PyObject* self) { return in_cudas_name(str_of_device(self)); };
  PyType_Modified(device);
}

}  // namespace sim
