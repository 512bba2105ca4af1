// Reads Python arguments by name. The first wrong argument sets a Python error.
#pragma once
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "problem.h"

namespace clearhead {

class NamedArguments {
  public:
    NamedArguments(const char* function, PyObject* arguments)
        : function_(function), unread_(arguments ? PyDict_Copy(arguments) : PyDict_New()) {}
    ~NamedArguments() { Py_XDECREF(unread_); }
    NamedArguments(const NamedArguments&) = delete;

    PyObject* required(const char* name) {
        PyObject* value = find(name);
        if (!value) fail(PyExc_TypeError, name, "is missing");
        return value;
    }
    // A whole number of `least` or more.
    int64_t integer(const char* name, int64_t least) {
        PyObject* value = required(name);
        return value ? integer_of(name, value, least) : 0;
    }
    int64_t integer_or(const char* name, int64_t otherwise, int64_t least = INT64_MIN) {
        PyObject* value = find(name);
        return value ? integer_of(name, value, least) : otherwise;
    }
    double real_or(const char* name, double otherwise) {
        PyObject* value = find(name);
        if (!value) return otherwise;
        const double x = PyFloat_AsDouble(value);
        if (x == -1 && PyErr_Occurred()) fail(PyExc_TypeError, name, "is not a number");
        return x;
    }
    bool flag(const char* name) {
        PyObject* value = find(name);
        return value && PyObject_IsTrue(value) == 1;
    }
    template <class T>
    T* address(const char* name) {
        return reinterpret_cast<T*>(integer_or(name, 0));
    }
    // Reads `count` strides. False if the argument is not given.
    bool strides(const char* name, int64_t* to, Py_ssize_t count) {
        PyObject* value = find(name);
        if (!value) return false;
        if (!PyTuple_Check(value) || PyTuple_Size(value) != count) {
            fail(PyExc_TypeError, name, "is not a tuple with a stride for each of its dimensions");
            return true;
        }
        for (Py_ssize_t n = 0; n < count; n++) to[n] = integer_of(name, PyTuple_GetItem(value, n), INT64_MIN);
        return true;
    }
    void fail(PyObject* kind, const char* name, const char* why) {
        if (failed_) return;
        failed_ = true;
        PyErr_Clear();
        PyErr_Format(kind, "%s: %s %s", function_, name, why);
    }
    // Whether all arguments were valid, and none has an unknown name.
    bool finished() {
        PyObject *name, *value;
        Py_ssize_t place = 0;
        if (!PyErr_Occurred() && PyDict_Next(unread_, &place, &name, &value))
            PyErr_Format(PyExc_TypeError, "%s: unknown argument %R", function_, name);
        return !PyErr_Occurred();
    }

  private:
    // Null if it is not given, or None. The reference is borrowed from the caller's dict.
    PyObject* find(const char* name) {
        PyObject* value = unread_ ? PyDict_GetItemString(unread_, name) : nullptr;
        if (value) PyDict_DelItemString(unread_, name);
        return value == Py_None ? nullptr : value;
    }
    int64_t integer_of(const char* name, PyObject* value, int64_t least) {
        const int64_t x = PyLong_AsLongLong(value);
        if (x == -1 && PyErr_Occurred())
            fail(PyExc_TypeError, name, "is not a whole number");
        else if (x < least)
            fail(PyExc_ValueError, name, "is too small");
        return x;
    }

    const char* function_;
    PyObject* unread_;
    bool failed_ = false;
};

}  // namespace clearhead
