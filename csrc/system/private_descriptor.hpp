// A file descriptor that forked children do not inherit.
//
// O_CLOEXEC closes a descriptor on exec. A forked child without exec (a data loader's worker) would
// keep a copy for its whole life, and with it the space of an anonymous file, the lock of a device,
// and the requests of a ring.
#pragma once

#include <utility>

namespace memascend {

/// Owns a descriptor and closes it. A forked child closes its copy at once; using or destroying the
/// child's object touches no descriptor.
class PrivateDescriptor {
 public:
  PrivateDescriptor() = default;
  /// Takes ownership of `descriptor`; a negative one means none.
  explicit PrivateDescriptor(int descriptor);
  ~PrivateDescriptor() { close(); }
  PrivateDescriptor(PrivateDescriptor&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), fork_count_(other.fork_count_) {}
  PrivateDescriptor& operator=(PrivateDescriptor&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(fork_count_, other.fork_count_);
    return *this;
  }
  PrivateDescriptor(const PrivateDescriptor&) = delete;
  PrivateDescriptor& operator=(const PrivateDescriptor&) = delete;

  /// The descriptor; -1 if there is none, or it is closed.
  int get() const noexcept;
  void close() noexcept;

 private:
  int descriptor_ = -1;
  unsigned fork_count_ = 0;  // of the process that owns the descriptor
};

}  // namespace memascend
