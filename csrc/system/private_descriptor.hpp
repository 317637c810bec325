// A file descriptor that forked children do not get.
//
// O_CLOEXEC closes a descriptor when another program starts; a child that goes on without one (a
// data loader's worker) keeps a copy, and with it the space of a file without a name, the lock of a
// device, and the requests of a ring, for as long as it lives.
#pragma once

#include <utility>

namespace memascend {

/// Owns a descriptor and closes it; a child closes its copy as soon as it is forked. There the
/// object is left as it is: using or destroying it touches no descriptor.
class PrivateDescriptor {
 public:
  PrivateDescriptor() = default;
  /// Takes over `descriptor`; a negative one stands for none.
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

  /// The descriptor; -1 where there is none, or not any more.
  int get() const noexcept;
  void close() noexcept;

 private:
  int descriptor_ = -1;
  unsigned fork_count_ = 0;  // of the process that it belongs to
};

}  // namespace memascend
