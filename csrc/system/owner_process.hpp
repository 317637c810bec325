// OwnerProcess: the process that made an object. A forked child inherits the object's bytes, but
// not its threads, memory or descriptors, nor its state in a device.
#pragma once

#include <unistd.h>

namespace memascend {

class OwnerProcess {
 public:
  /// False in a forked child.
  bool is_current() const noexcept { return ::getpid() == process_; }
  int number() const noexcept { return process_; }

 private:
  pid_t process_ = ::getpid();
};

}  // namespace memascend
