// The kernel's io_uring interface: its header, the three system calls, and the constants and
// structures that an older header lacks. No logic; no other file includes the header.
#pragma once

#include <linux/io_uring.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)  // Linux 5.19
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)  // Linux 6.0
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)  // Linux 6.1
#endif

namespace memascend::uring {

// Opcodes of io_uring_register; an enum in the kernel's header, so #ifndef cannot complete it.
constexpr unsigned kRegisterFiles = 2;
constexpr unsigned kUnregisterFiles = 3;
constexpr unsigned kRegisterEnableRings = 12;  // Linux 5.10

struct Timespec {  // struct __kernel_timespec
  std::int64_t seconds;
  std::int64_t nanoseconds;
};

struct WaitArgument {  // struct io_uring_getevents_arg, Linux 5.11
  std::uint64_t signal_mask;
  std::uint32_t signal_mask_bytes;
  std::uint32_t padding;
  std::uint64_t timespec;
};

// Each returns the result of the system call: -1 and errno on failure.
inline int setup(unsigned entries, io_uring_params* parameters) {
  return static_cast<int>(::syscall(SYS_io_uring_setup, entries, parameters));
}

inline int enter(int ring, unsigned submit_count, unsigned complete_min, unsigned flags,
                 const void* argument, std::size_t argument_bytes) {
  return static_cast<int>(::syscall(SYS_io_uring_enter, ring, submit_count, complete_min, flags,
                                    argument, argument_bytes));
}

inline int do_register(int ring, unsigned opcode, const void* argument, unsigned count) {
  return static_cast<int>(::syscall(SYS_io_uring_register, ring, opcode, argument, count));
}

}  // namespace memascend::uring
