// sources: csrc/base/*.cpp csrc/system/*.cpp csrc/nvme/**/*.cpp
//
// What a call into the store waits for while the file system is slow, and what it makes of a file
// system that does not answer. Calls of the system stop here on demand.
#include <dlfcn.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "nvme/store.hpp"
#include "support/expect.hpp"

namespace {

constexpr unsigned kHangsSeconds = 60;  // a call that waits for ever ends the program

/// Where calls of one kind stop until they are let go.
class Gate {
 public:
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  void open() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = false;
    }
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    if (!closed_) return;
    ++stopped_count_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !closed_; });
    --stopped_count_;
  }
  void wait_for_one() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stopped_count_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
  int stopped_count_ = 0;
};

Gate before_fallocate;
Gate before_statvfs;
Gate before_ftruncate;
Gate before_memory;  // of checksums
std::atomic<int> statvfs_error = 0;

}  // namespace

// These stand before libc's.
extern "C" int fallocate(int descriptor, int mode, off_t offset, off_t nbytes) {
  before_fallocate.pass();
  return static_cast<int>(::syscall(SYS_fallocate, descriptor, mode, offset, nbytes));
}
extern "C" int ftruncate(int descriptor, off_t nbytes) noexcept {
  before_ftruncate.pass();
  return static_cast<int>(::syscall(SYS_ftruncate, descriptor, nbytes));
}
extern "C" int fstatvfs(int descriptor, struct statvfs* state) noexcept {
  before_statvfs.pass();
  if (statvfs_error != 0) {
    errno = statvfs_error;
    return -1;
  }
  static const auto next = reinterpret_cast<decltype(&fstatvfs)>(::dlsym(RTLD_NEXT, "fstatvfs"));
  return next(descriptor, state);
}

namespace memascend {
namespace {

constexpr std::uint64_t kMib = 1 << 20;
alignas(4096) std::byte bounce[64 * 1024];
alignas(4096) std::byte source[64 * 1024];

std::shared_ptr<Store> open_store(std::vector<VolumeOptions> volumes,
                                  std::function<void()> while_waiting = {}) {
  StoreOptions options;
  options.volumes = std::move(volumes);
  options.engine = "threads";
  options.grow_bytes = kMib;
  options.transfer.chunk_bytes = 64 * 1024;
  options.transfer.bounce = bounce;
  options.while_waiting = std::move(while_waiting);
  return Store::open(std::move(options));
}

void counters_do_not_wait_for_a_reservation() {
  const std::shared_ptr<Store> store = open_store({{"."}});
  store->reserve("k", kMib);
  before_fallocate.close();
  std::thread other([&] { store->reserve("large", 64 * kMib); });
  before_fallocate.wait_for_one();
  store->wait(*store->write("k", sizeof(source), {source, 0, nullptr}, 0));
  const StoreStats stats = store->stats();
  EXPECT(stats.counts.at("bytes_written") == sizeof(source));
  EXPECT(stats.counts.at("used_bytes") == kMib);
  EXPECT(stats.counts.at("reserved_bytes") == kMib);
  EXPECT(store->volume_stats().front().used_bytes == kMib);
  before_fallocate.open();
  other.join();
  EXPECT(store->stats().counts.at("used_bytes") == 65 * kMib);
  EXPECT(store->discard("large"));
  EXPECT(store->stats().counts.at("used_bytes") == kMib);
}

/// Finding memory may take long, and may take another lock (Python's) that a caller here holds.
void nothing_is_locked_while_memory_for_checksums_is_found() {
  StoreOptions options;
  options.volumes = {{"."}};
  options.engine = "threads";
  options.grow_bytes = kMib;
  options.transfer.chunk_bytes = 64 * 1024;
  options.transfer.bounce = bounce;
  options.verify = Verify::kReads;
  options.checksum_memory = [](std::uint64_t nbytes) {
    before_memory.pass();
    return std::shared_ptr<std::byte>(new std::byte[nbytes], std::default_delete<std::byte[]>());
  };
  const std::shared_ptr<Store> store = Store::open(std::move(options));
  store->reserve("k", kMib);
  before_memory.close();
  std::thread other([&] { store->provide_checksums(kMib); });
  before_memory.wait_for_one();
  store->wait(*store->write("k", sizeof(source), {source, 0, nullptr}, 0));
  EXPECT(store->stats().counts.at("checksum_bytes") < kMib);
  std::thread closing([&] { store->close(); });  // waits for that
  before_memory.open();
  other.join();
  closing.join();
}

template <typename Call>
int code_of_store_error(Call call) {
  try {
    call();
  } catch (const StoreError& error) {
    EXPECT(std::string(error.what()).find("fix: ") != std::string::npos);
    return error.place().code;
  }
  return 0;
}

void a_file_system_that_does_not_answer_is_an_error_of_the_store_and_no_counters() {
  const std::shared_ptr<Store> store = open_store({{"."}, {"."}});
  store->reserve("k", kMib);
  statvfs_error = ESTALE;
  EXPECT(store->stats().counts.at("used_bytes") == kMib);
  EXPECT(store->volume_stats().size() == 2);
  EXPECT(code_of_store_error([&] { store->available_bytes(); }) == ESTALE);
  EXPECT(code_of_store_error([&] { store->reserve("small", 4096); }) == ESTALE);
  EXPECT(code_of_store_error([&] { store->reserve("striped", 64 * kMib); }) == ESTALE);
  EXPECT(code_of_store_error([&] { store->write("new", 4096, {source, 0, nullptr}); }) == ESTALE);
  statvfs_error = 0;
  store->reserve("striped", 64 * kMib);
  EXPECT(store->available_bytes() > 0);
}

void a_reservation_gets_the_room_that_is_being_given_back() {
  const std::shared_ptr<Store> store = open_store({{.path = ".", .capacity_bytes = kMib}});
  store->reserve("old", kMib);
  before_statvfs.close();
  std::thread reserving([&] { store->reserve("new", kMib); });
  before_statvfs.wait_for_one();  // it has looked for room, and there is none
  std::thread discarding([&] { store->discard("old"); });
  while (store->contains("old")) std::this_thread::yield();
  before_statvfs.open();
  reserving.join();
  discarding.join();
  EXPECT(store->nbytes("new") == kMib);
  EXPECT(store->keys().size() == 1);
}

void a_second_close_returns_when_the_first_has_closed() {
  const std::shared_ptr<Store> store = open_store({{"."}});
  store->reserve("k", kMib);
  before_ftruncate.close();
  std::thread first([&] { store->close(); });
  before_ftruncate.wait_for_one();
  std::atomic<bool> is_let_go = false;
  std::atomic<bool> was_early = false;
  std::atomic<bool> is_over = false;
  std::thread second([&] {
    store->close();
    was_early = !is_let_go;
    is_over = true;
  });
  // One that is early has some time to be so.
  for (int turn = 0; turn < 20 && !is_over; ++turn) ::usleep(10'000);
  is_let_go = true;
  before_ftruncate.open();
  first.join();
  second.join();
  EXPECT(!was_early);
  store->close();
}

/// As a signal's handler of Python, which runs on a thread that waits.
void a_handler_may_close_the_store_on_the_thread_that_closes_it() {
  std::weak_ptr<Store> closing;
  std::atomic<int> handled_count = 0;
  const std::shared_ptr<Store> store = open_store({{"."}}, [&] {
    ++handled_count;
    if (const auto found = closing.lock()) found->close();
  });
  closing = store;
  before_fallocate.close();
  std::thread other([&] {
    try {
      store->reserve("k", kMib);
    } catch (const std::invalid_argument&) {  // it was closed meanwhile
    }
  });
  before_fallocate.wait_for_one();
  std::thread opener([&] {
    while (handled_count == 0) std::this_thread::yield();
    before_fallocate.open();
  });
  store->close();
  other.join();
  opener.join();
  EXPECT(handled_count > 0);
}

}  // namespace
}  // namespace memascend

int main() {
  using namespace memascend;
  ::alarm(kHangsSeconds);
  counters_do_not_wait_for_a_reservation();
  nothing_is_locked_while_memory_for_checksums_is_found();
  a_file_system_that_does_not_answer_is_an_error_of_the_store_and_no_counters();
  a_reservation_gets_the_room_that_is_being_given_back();
  a_second_close_returns_when_the_first_has_closed();
  a_handler_may_close_the_store_on_the_thread_that_closes_it();
  return 0;
}
