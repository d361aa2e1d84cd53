"""Hands NumPy memory to headway and headway memory to NumPy, without a copy. See dlpack_numpy.rs."""

import ctypes
import pathlib
import sys

import numpy as np

name = {"darwin": "libdlpack_numpy.dylib", "win32": "dlpack_numpy.dll"}.get(sys.platform, "libdlpack_numpy.so")
lib = ctypes.CDLL(str(pathlib.Path(sys.argv[1]) / name))
api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
for function in (lib.headway_normalise, lib.headway_normalise_versioned):
    function.argtypes = [ctypes.c_void_p]
lib.headway_count.restype = ctypes.c_void_p
lib.headway_count.argtypes = [ctypes.c_size_t, ctypes.c_size_t]

USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}


def normalise(x, versioned=False):
    """Rows of x divided by their root mean square, in place, by headway."""
    name = b"dltensor_versioned" if versioned else b"dltensor"
    capsule = x.__dlpack__(max_version=(1, 0)) if versioned else x.__dlpack__()
    pointer = api.PyCapsule_GetPointer(capsule, name)
    api.PyCapsule_SetName(capsule, USED[name])  # headway calls the deleter, not the capsule
    function = lib.headway_normalise_versioned if versioned else lib.headway_normalise
    return function(pointer) == 0


class Counted:
    """A tensor of headway's, as anything that speaks DLPack takes it."""

    def __init__(self, rows, width):
        self.pointer = lib.headway_count(rows, width)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        return api.PyCapsule_New(self.pointer, b"dltensor", None)


print("numpy", np.__version__)
x = np.array([[3, 4, 99], [0, 2, 99]], dtype=np.float32)
assert normalise(x[:, :2]), "a view with a stride"
print("in place, the third column untouched:", x.tolist())
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1):
    y = np.full((2, 4), 5, dtype=np.float32)
    assert normalise(y, versioned=True)
    print("versioned:", y.tolist())
    y.flags.writeable = False
    print("read-only is refused:", not normalise(y, versioned=True))
print("float64 is refused:", not normalise(np.ones((2, 2))))
print("a transposed view is refused:", not normalise(np.ones((2, 3), dtype=np.float32).T))
counted = np.from_dlpack(Counted(2, 3))
print("headway's memory in numpy:", counted.tolist())
del counted  # numpy calls headway's deleter
try:
    import torch
except ImportError:
    print("torch is not installed; its part is left out")
else:
    t = torch.tensor([[3.0, 4.0]])
    assert normalise(t)
    print("torch", torch.__version__, t.tolist(), torch.from_dlpack(Counted(1, 3)).tolist())
