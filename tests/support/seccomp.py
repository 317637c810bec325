"""What a program begins with so that the system refuses a call, as container runtimes do (seccomp).

Text, put before a program of `store_programs`, or of one's own. Call numbers are those of x86-64.
"""

from __future__ import annotations

import platform

import pytest

on_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64 call numbers")

# A row: code, jump if true, if false, value.
_INSTALL = """
import ctypes, errno, os, struct
def install(rows):
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("code", ctypes.c_void_p)]
    program = Program(len(rows), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL_WITH = 0x7FFF0000, 0x00050000
NUMBER, SECOND_ARGUMENT, THIRD_ARGUMENT = 0, 24, 32  # where they are in struct seccomp_data
"""

DENY_URING = f"""{_INSTALL}
IO_URING_SETUP = 425
install([
    (LOAD, 0, 0, NUMBER), (EQUAL, 0, 1, IO_URING_SETUP),
    (RETURN, 0, 0, FAIL_WITH | errno.EPERM), (RETURN, 0, 0, ALLOW)])
"""

#: And the older asynchronous I/O.
DENY_ASYNCHRONOUS = f"""{DENY_URING}
IO_SETUP = 206
install([
    (LOAD, 0, 0, NUMBER), (EQUAL, 0, 1, IO_SETUP),
    (RETURN, 0, 0, FAIL_WITH | errno.ENOSYS), (RETURN, 0, 0, ALLOW)])
"""

DENY_TMPFILE = f"""{_INSTALL}
OPENAT, TMPFILE_BIT = 257, 0o20000000
install([
    (LOAD, 0, 0, NUMBER), (EQUAL, 0, 3, OPENAT), (LOAD, 0, 0, THIRD_ARGUMENT),
    (ANY_BIT, 0, 1, TMPFILE_BIT), (RETURN, 0, 0, FAIL_WITH | errno.EOPNOTSUPP),
    (RETURN, 0, 0, ALLOW)])
"""

#: As before Linux 5.6; the number is that of every architecture.
DENY_OPENAT2 = f"""{_INSTALL}
OPENAT2 = 437
install([
    (LOAD, 0, 0, NUMBER), (EQUAL, 0, 1, OPENAT2),
    (RETURN, 0, 0, FAIL_WITH | errno.ENOSYS), (RETURN, 0, 0, ALLOW)])
"""

#: fcntl(F_SETFL, ... | O_DIRECT), as file systems without direct I/O refuse it.
DENY_DIRECT = f"""{_INSTALL}
FCNTL, F_SETFL = 72, 4
install([
    (LOAD, 0, 0, NUMBER), (EQUAL, 0, 5, FCNTL), (LOAD, 0, 0, SECOND_ARGUMENT),
    (EQUAL, 0, 3, F_SETFL), (LOAD, 0, 0, THIRD_ARGUMENT), (ANY_BIT, 0, 1, os.O_DIRECT),
    (RETURN, 0, 0, FAIL_WITH | errno.EINVAL), (RETURN, 0, 0, ALLOW)])
"""

#: madvise(..., MADV_POPULATE_WRITE), as before Linux 5.14.
DENY_POPULATE = f"""{_INSTALL}
MADVISE, POPULATE_WRITE = 28, 23
install([
    (LOAD, 0, 0, NUMBER), (EQUAL, 0, 3, MADVISE), (LOAD, 0, 0, THIRD_ARGUMENT),
    (EQUAL, 0, 1, POPULATE_WRITE), (RETURN, 0, 0, FAIL_WITH | errno.EINVAL),
    (RETURN, 0, 0, ALLOW)])
"""
