"""What a program begins with so that the system refuses a call, as container runtimes do (seccomp).

Text, put before a program of `store_programs`, or of one's own. Call numbers are those of x86-64.
"""

from __future__ import annotations

import errno
import os
import platform

import pytest

on_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64 call numbers")

# What the kernel's filter programs are made of, and where values are in struct seccomp_data.
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
_NUMBER, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 24, 32


def _deny(code: int, *conditions: tuple[int, int, int]) -> str:
    """Return what has calls fail with `code`, where (place, comparison, value) are all true."""
    rows: list[tuple[int, int, int, int]] = []  # code, jump if true, if false, value
    for left, (place, comparison, value) in zip(
        reversed(range(len(conditions))), conditions, strict=True
    ):
        rows += [(_LOAD, 0, 0, place), (comparison, 0, 2 * left + 1, value)]
    rows += [(_RETURN, 0, 0, _FAIL_WITH | code), (_RETURN, 0, 0, _ALLOW)]
    return f"""
import ctypes, struct
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in {rows}))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
program = Program({len(rows)}, ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
"""


_IO_URING_SETUP, _IO_SETUP = (_NUMBER, _EQUAL, 425), (_NUMBER, _EQUAL, 206)
_OPENAT, _OPENAT2 = (_NUMBER, _EQUAL, 257), (_NUMBER, _EQUAL, 437)
_FCNTL, _MADVISE = (_NUMBER, _EQUAL, 72), (_NUMBER, _EQUAL, 28)

DENY_URING = _deny(errno.EPERM, _IO_URING_SETUP)
_MEMORY_POLICY = [(_NUMBER, _EQUAL, number) for number in (237, 238, 239)]
#: What Docker's default profile refuses of what is called here: io_uring, and memory policies
#: (mbind, set_mempolicy, get_mempolicy), which need CAP_SYS_NICE.
DENY_DOCKER = DENY_URING + "".join(_deny(errno.EPERM, call) for call in _MEMORY_POLICY)
#: And the older asynchronous I/O.
DENY_ASYNCHRONOUS = DENY_URING + _deny(errno.ENOSYS, _IO_SETUP)
#: openat(..., O_TMPFILE): the bit that O_DIRECTORY has not.
DENY_TMPFILE = _deny(errno.EOPNOTSUPP, _OPENAT, (_THIRD_ARGUMENT, _ANY_BIT, 0o20000000))
#: fcntl(F_SETFL, ... | O_DIRECT), as file systems without direct I/O refuse it.
DENY_DIRECT = _deny(
    errno.EINVAL,
    _FCNTL,
    (_SECOND_ARGUMENT, _EQUAL, 4),
    (_THIRD_ARGUMENT, _ANY_BIT, os.O_DIRECT),
)
#: madvise(..., MADV_POPULATE_WRITE), as before Linux 5.14.
DENY_POPULATE = _deny(errno.EINVAL, _MADVISE, (_THIRD_ARGUMENT, _EQUAL, 23))


def deny_openat2(code: int) -> str:
    """Return what has openat2 fail: with ENOSYS as before Linux 5.6."""
    return _deny(code, _OPENAT2)
