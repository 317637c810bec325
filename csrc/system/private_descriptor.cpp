#include "system/private_descriptor.hpp"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace memascend {
namespace {

/// What forked children close. Never destroyed: threads of ours may outlive static objects.
struct Registry {
  std::mutex mutex;
  std::set<int> descriptors;
};

Registry& registry() {
  static Registry* const instance = [] {
    auto* made = new Registry;
    // The lock is held across the fork, so that the child finds the set whole.
    ::pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                     [] {
                       for (const int descriptor : registry().descriptors) ::close(descriptor);
                       registry().descriptors.clear();
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
}

void PrivateDescriptor::close() noexcept {
  const int descriptor = std::exchange(descriptor_, -1);
  if (descriptor < 0) return;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  // Not there in a child: it has closed its copy, and the number may be another file's by now.
  if (all.descriptors.erase(descriptor) > 0) ::close(descriptor);
}

}  // namespace memascend
