// Store: named byte ranges on SSD. Keys -> extents; read and write by key, asynchronously.
//
// Connects volumes, space, engines and their queue, and adds keys, the order of transfers on one
// key, tickets, and owners that outlive their I/O. Knows nothing of tensors, pools or Python.
//
// Any thread may call any method. A store belongs to the process that opened it: in a forked child
// every call is refused, and dropping the child's copy has no effect.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "nvme/engine/errors.hpp"
#include "nvme/engine/factory.hpp"
#include "nvme/engine/volumes.hpp"
#include "nvme/space/space.hpp"
#include "nvme/store_stats.hpp"
#include "nvme/transfer/queue.hpp"
#include "system/owner_process.hpp"

namespace memascend {

struct StoreOptions {
  std::vector<VolumeOptions> volumes;
  std::string engine = "auto";
  EngineOptions engine_options;                          // for each volume
  std::uint64_t grow_bytes = SpaceOptions().grow_bytes;  // growth step of the volumes' files
  // For keys on several volumes; 0: the size of a request, at least a mebibyte.
  std::uint64_t stripe_bytes = 0;
  Verify verify = Verify::kOff;
  Checksums::MemorySource checksum_memory;  // empty: the process's own memory
  TransferOptions transfer;
  std::shared_ptr<void> bounce_hold;  // owner of transfer.bounce, for the life of the store
  /// Called at intervals on a waiting thread, without a lock. An exception of it ends the wait.
  std::function<void()> while_waiting;
};

/// A handle for waiting on one read or write. Filled by the store.
class Ticket {
 public:
  explicit Ticket(Operation operation, std::uint64_t nbytes)
      : operation_(operation), nbytes_(nbytes) {}
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  /// True when the transfer has succeeded or failed; its memory is then no longer used.
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

 private:
  friend class Store;
  const Operation operation_;
  const std::uint64_t nbytes_;
  std::atomic<bool> done_ = false;
  std::optional<ErrorPlace> error_;   // written before done_
  std::condition_variable finished_;  // with the store's mutex
  std::size_t waiter_count_ = 0;
  Transfer* transfer_ = nullptr;  // while in flight; guarded by the store's mutex
};

class Store {
 public:
  static constexpr std::chrono::hours kForever{24 * 365 * 100};  // the longest that clocks can add

  /// Memory of one transfer. `capacity_bytes` (0: as the transfer) is the usable memory from `data`
  /// on: with a page-rounded slot an odd tail needs no bounce. A read may overwrite it, a write may
  /// store it after the key's end. `hold` is kept until the I/O has ended; the next call into the
  /// store then drops it, on the caller's thread and without a lock.
  struct Memory {
    std::byte* data;
    std::uint64_t capacity_bytes = 0;
    std::shared_ptr<void> hold;
  };

  /// Behaviour while another call is in the store, which takes microseconds.
  enum class Busy { kWait, kReturn };

  /// Throws SystemCallError (directory), EngineUnavailableError, std::invalid_argument (options).
  static std::shared_ptr<Store> open(StoreOptions options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// Reserves space for a key. A key of that size is left unchanged; one of another size is
  /// replaced after its I/O. The content is unspecified. Throws StoreFullError: nothing changed.
  /// Other I/O continues while the file system works.
  void reserve(const std::string& key, std::uint64_t nbytes);
  /// Starts writing. Without `offset` the bytes become the whole key, which is reserved as by
  /// reserve(); with one they go into an existing key. Runs after earlier transfers that overlap.
  /// With Busy::kReturn and an `offset` it never waits: returns nullptr instead, with no change.
  std::shared_ptr<Ticket> write(const std::string& key, std::uint64_t nbytes, Memory source,
                                std::optional<std::uint64_t> offset = std::nullopt,
                                Busy busy = Busy::kWait);
  /// Starts reading. Returns the data of every write started before. Busy::kReturn as in write().
  std::shared_ptr<Ticket> read(const std::string& key, std::uint64_t nbytes, Memory target,
                               std::uint64_t offset = 0, Busy busy = Busy::kWait);
  /// Waits for one transfer; false if it has not ended within `timeout`. Throws StoreError if it
  /// failed, in every call.
  bool wait(Ticket& ticket, std::chrono::milliseconds timeout = kForever);
  /// Whether wait() would return at once without error. Never waits; may be late to return true.
  bool ended_well(const Ticket& ticket);
  /// Waits until nothing is in flight. Tickets keep their errors.
  void wait_all();
  /// Removes a key after its I/O; false if there is none.
  bool discard(const std::string& key);
  /// Gives the space that no key has back to the file systems.
  void shrink();
  /// Exchanges the contents of two keys, with their transfers in flight.
  void exchange(const std::string& key, const std::string& other);
  bool contains(const std::string& key);
  std::uint64_t nbytes(const std::string& key);
  std::vector<std::string> keys();
  /// These two never wait for a file system, so that every training step may call them.
  StoreStats stats();
  std::vector<VolumeStats> volume_stats();
  /// Bytes that may still be reserved. Queries the file systems; throws StoreError if one fails.
  std::uint64_t available_bytes();

  /// Allocates `nbytes` for checksums in advance, if any are kept; other calls continue meanwhile.
  void provide_checksums(std::uint64_t nbytes);
  /// Sets the remedy for corrupted data in error messages.
  void set_recovery(const std::string& recovery);

  /// The engine of the first volume; the reason names volumes with another one.
  const std::string& engine_name() const noexcept { return engine_name_; }
  const std::string& engine_reason() const noexcept { return engine_reason_; }
  const std::string& engine_description() const noexcept { return engine_description_; }
  Alignment alignment() const noexcept { return space_.alignment(); }
  /// True if no volume uses the page cache.
  bool direct() const noexcept { return direct_; }

  /// For a program's end: from now on a wait throws if a silent device may still use memory.
  void end_patience() noexcept { ending_ = true; }
  /// Waits for everything in flight, and gives all space back. Later calls except close() are
  /// refused. Does nothing in a forked child. If another thread is closing the store, returns when
  /// it is closed. Discards the stored data on the devices; an exception of `while_waiting` ends
  /// the discard, and is thrown after the store is closed. If one ends the wait for I/O, the last
  /// owner does not wait again: the store, its threads and the memory in flight are leaked.
  void close();

 private:
  struct Entry;
  struct Job;
  class LockedCall;
  class SpaceCall;

  Store(StoreOptions options, std::vector<Volume> volumes);
  static void drop(Store* store) noexcept;
  Entry& find(const std::string& key);
  void reserve_locked(SpaceCall& space, const std::string& key, std::uint64_t nbytes);
  Entry* wait_until_quiet(LockedCall& call, const std::string& key);
  std::shared_ptr<Ticket> start(Entry& entry, const KeyRange& range, std::shared_ptr<void> hold);
  void finished(std::span<Transfer* const> transfers);
  void finish(Job* job, std::vector<Job*>* over);
  void hurry(const Entry& entry, const Transfer* last);
  bool take(SpaceCall& space, const std::string& key, std::uint64_t nbytes,
            const std::function<bool()>& is_there);
  void discard_space();
  std::vector<std::unique_ptr<Engine>> make_engines(const StoreOptions& options);

  const OwnerProcess owner_;
  const std::function<void()> while_waiting_;
  std::unique_ptr<Checksums> checksums_;
  std::mutex space_mutex_;  // guards space_; never locked together with mutex_
  Space space_;
  std::shared_ptr<void> bounce_hold_;
  std::string engine_name_;
  std::string engine_reason_;
  std::string engine_description_;
  const std::function<void(const std::string&)> report_;
  const bool direct_;
  std::atomic<bool> ending_ = false;
  const std::uint64_t block_bytes_;

  std::mutex mutex_;  // guards the following members
  std::map<std::string, std::unique_ptr<Entry>> entries_;
  std::vector<std::shared_ptr<void>> retired_holds_;  // of ended transfers
  std::size_t job_count_ = 0;
  std::size_t space_call_count_ = 0;  // calls that are inside space_
  std::size_t giving_count_ = 0;      // of them, calls that give space back
  std::uint64_t given_count_ = 0;     // calls that have given space back so far
  std::condition_variable quiet_;     // a transfer or a space call ended while a thread waits
  std::size_t quiet_waiter_count_ = 0;
  std::chrono::steady_clock::duration wait_time_{};
  std::string recovery_ = "start again from data that is known to be good";
  bool closed_ = false;
  bool abandoned_ = false;
  std::thread::id closer_;  // the thread that ends the lanes and gives the space back
  bool ended_ = false;      // the closer has finished

  std::shared_ptr<TransferQueue> queue_;  // last: its threads use all of the above
};

}  // namespace memascend
