#include "system/private_descriptor.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>

namespace memascend {
namespace {

/// The descriptors that forked children close. Never destroyed: threads may outlive static data.
struct Registry {
  std::mutex mutex;
  std::set<int> descriptors;
  std::atomic<unsigned> fork_count = 0;  // forks between the first process and this one
};

Registry& registry() {
  static Registry* const instance = [] {
    auto* made = new Registry;
    // The lock is held across the fork, so that the child finds a consistent set.
    ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                     [] {
                       for (const int descriptor : registry().descriptors) ::close(descriptor);
                       registry().descriptors.clear();
                       ++registry().fork_count;
                       registry().mutex.unlock();
                     });
    return made;
  }();
  return *instance;
}

}  // namespace

PrivateDescriptor::PrivateDescriptor(int descriptor) : descriptor_(descriptor) {
  if (descriptor < 0) return;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.descriptors.insert(descriptor);
  fork_count_ = all.fork_count;
}

// A child has closed its copy, and the number may by now belong to another file.
int PrivateDescriptor::get() const noexcept {
  return descriptor_ < 0 || fork_count_ != registry().fork_count ? -1 : descriptor_;
}

void PrivateDescriptor::close() noexcept {
  const int descriptor = get();
  descriptor_ = -1;
  if (descriptor < 0) return;
  Registry& all = registry();
  // Under the lock, so that no child is forked between the erase and the close.
  const std::lock_guard lock(all.mutex);
  all.descriptors.erase(descriptor);
  ::close(descriptor);
}

}  // namespace memascend
