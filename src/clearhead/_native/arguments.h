// Python numbers to C++: arguments by name, and addresses one after the other. What is wrong leaves a Python error behind.
#pragma once
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "problem.h"

namespace clearhead {

class NamedArguments {
  public:
    NamedArguments(const char* function, PyObject* names) : function_(function), names_(names) {}

    // A whole number of `least` or more.
    int64_t integer(const char* name, int64_t least) {
        PyObject* given = find(name);
        return given ? integer_of(name, given, least) : missing(name);
    }
    int64_t integer_or(const char* name, int64_t otherwise, int64_t least = INT64_MIN) {
        PyObject* given = find(name);
        return given ? integer_of(name, given, least) : otherwise;
    }
    double real_or(const char* name, double otherwise) {
        PyObject* given = find(name);
        if (!given) return otherwise;
        const double x = PyFloat_AsDouble(given);
        return PyErr_Occurred() ? (fail(PyExc_TypeError, name, "is not a number"), otherwise) : x;
    }
    bool flag(const char* name) {
        PyObject* given = find(name);
        return given && PyObject_IsTrue(given) == 1;
    }
    template <class T>
    T* address(const char* name) {
        return reinterpret_cast<T*>(integer_or(name, 0));
    }
    PyObject* required(const char* name) {
        PyObject* given = find(name);
        if (!given) missing(name);
        return given;
    }
    // So many strides; false where the argument is not given.
    bool strides(const char* name, int64_t* to, Py_ssize_t count) {
        PyObject* given = find(name);
        if (!given) return false;
        if (!PyTuple_Check(given) || PyTuple_Size(given) != count) {
            fail(PyExc_TypeError, name, "is not a tuple with a stride for each of its dimensions");
            return false;
        }
        for (Py_ssize_t n = 0; n < count; n++) to[n] = integer_of(name, PyTuple_GetItem(given, n), INT64_MIN);
        return true;
    }
    void fail(PyObject* kind, const char* name, const char* why) {
        if (failed_) return;
        failed_ = true;
        PyErr_Clear();
        PyErr_Format(kind, "%s: %s %s", function_, name, why);
    }
    bool failed() const { return failed_; }
    // Whether all arguments were as they should be, and none has another name.
    bool finished() {
        PyObject *name, *value;
        Py_ssize_t place = 0;
        if (failed_ || !names_ || PyDict_Size(names_) == found_) return !failed_;
        while (PyDict_Next(names_, &place, &name, &value))
            if (!known(name)) PyErr_Format(PyExc_TypeError, "%s: unknown argument %R", function_, name), failed_ = true;
        return !failed_;
    }

  private:
    static constexpr int MOST_NAMES = 48;

    PyObject* find(const char* name) {
        if (count_ < MOST_NAMES) seen_[count_++] = name;
        PyObject* given = names_ ? PyDict_GetItemString(names_, name) : nullptr;
        if (given) found_++;
        return given == Py_None ? nullptr : given;
    }
    bool known(PyObject* name) const {
        bool same = false;
        for (int n = 0; n < count_; n++) same = same || PyUnicode_CompareWithASCIIString(name, seen_[n]) == 0;
        return same;
    }
    int64_t integer_of(const char* name, PyObject* given, int64_t least) {
        const int64_t x = PyLong_AsLongLong(given);
        if (x == -1 && PyErr_Occurred()) return fail(PyExc_TypeError, name, "is not a whole number"), 0;
        if (x < least) fail(PyExc_ValueError, name, "is too small");
        return x;
    }
    int64_t missing(const char* name) {
        fail(PyExc_TypeError, name, "is missing");
        return 0;
    }

    const char* function_;
    PyObject* names_;
    const char* seen_[MOST_NAMES] = {};
    int count_ = 0;
    Py_ssize_t found_ = 0;
    bool failed_ = false;
};

class Addresses {
  public:
    Addresses(PyObject* const* items, Py_ssize_t count) : items_(items), left_(count) {}

    int64_t integer() { return left_-- > 0 ? PyLong_AsLongLong(*items_++) : 0; }
    template <class T>
    T* pointer() {
        return reinterpret_cast<T*>(integer());
    }
    bool finished() {
        if (left_ != 0 && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "wrong number of addresses");
        return !PyErr_Occurred();
    }

  private:
    PyObject* const* items_;
    Py_ssize_t left_;
};

}  // namespace clearhead
