// Store: named byte ranges on SSD. Keys -> extents; read and write by key, asynchronously.
//
// Wires volumes, space, engines and their queue together, and adds keys, the order of transfers on
// one key, tickets, and owners that outlive their I/O. Knows nothing of tensors, pools or Python.
//
// Every method may be called on any thread. A store belongs to the process that opened it: in a
// forked child every call is refused, and the child's copy is left alone when it is dropped.
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
  EngineOptions engine_options;                          // of each volume
  std::uint64_t grow_bytes = SpaceOptions().grow_bytes;  // steps of the volumes' files
  // Of keys over several volumes; 0: a request's size, at least a mebibyte.
  std::uint64_t stripe_bytes = 0;
  Verify verify = Verify::kOff;
  Checksums::MemorySource checksum_memory;  // empty: the process's own
  TransferOptions transfer;
  std::shared_ptr<void> bounce_hold;  // owner of transfer.bounce, kept as long as the store
  /// Called now and then on a thread that waits, without a lock. It may throw, which ends the wait.
  std::function<void()> while_waiting;
};

/// A handle to wait on for one read or write. Filled by the store.
class Ticket {
 public:
  explicit Ticket(Operation operation, std::uint64_t nbytes)
      : operation_(operation), nbytes_(nbytes) {}
  std::uint64_t nbytes() const noexcept { return nbytes_; }
  /// The transfer is over, well or not; its memory is quiet.
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }

 private:
  friend class Store;
  const Operation operation_;
  const std::uint64_t nbytes_;
  std::atomic<bool> done_ = false;
  std::optional<ErrorPlace> error_;   // written before done_
  std::condition_variable finished_;  // with the store's mutex
  std::size_t waiter_count_ = 0;
  Transfer* transfer_ = nullptr;  // with the store's mutex: in flight
};

class Store {
 public:
  static constexpr std::chrono::hours kForever{24 * 365 * 100};  // the longest clocks can add

  /// Memory of one transfer. `capacity_bytes` (0: as the transfer) is what may be used from `data`
  /// on: with a page-rounded slot an odd tail needs no bounce. A read may overwrite it, a write may
  /// store it where nothing else lies. `hold` is kept until the I/O is over; it is then dropped by
  /// the next call into the store, on the caller's thread and without a lock.
  struct Memory {
    std::byte* data;
    std::uint64_t capacity_bytes = 0;
    std::shared_ptr<void> hold;
  };

  /// What a call does when another one is in the store: they are in there for microseconds.
  enum class Busy { kWait, kReturn };

  /// Throws SystemCallError (directory), EngineUnavailableError, std::invalid_argument (options).
  static std::shared_ptr<Store> open(StoreOptions options);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  /// Finds room for a key now. A key of that size is left as it is; one of another size is replaced
  /// after its I/O. What the room contains is unspecified. Throws StoreFullError: nothing changed.
  /// I/O of others goes on however long the file system takes over it.
  void reserve(const std::string& key, std::uint64_t nbytes);
  /// Starts writing. Without `offset` the bytes become the whole key, which is reserved as by
  /// reserve(); with one they go into a key that is there. Follows earlier transfers that overlap.
  /// With Busy::kReturn and an `offset` it waits for nobody: nullptr, and nothing has changed.
  std::shared_ptr<Ticket> write(const std::string& key, std::uint64_t nbytes, Memory source,
                                std::optional<std::uint64_t> offset = std::nullopt,
                                Busy busy = Busy::kWait);
  /// Starts reading. Sees every write started before. Busy::kReturn as in write().
  std::shared_ptr<Ticket> read(const std::string& key, std::uint64_t nbytes, Memory target,
                               std::uint64_t offset = 0, Busy busy = Busy::kWait);
  /// Waits for one transfer; false when it is not over within `timeout`. Throws StoreError, as
  /// often as asked, when it failed.
  bool wait(Ticket& ticket, std::chrono::milliseconds timeout = kForever);
  /// Returns whether wait() would do nothing; waits for nobody. May be false for a moment more.
  bool ended_well(const Ticket& ticket);
  /// Waits until nothing is in flight. Tickets keep their errors.
  void wait_all();
  /// Forgets a key after its I/O; false when there is none.
  bool discard(const std::string& key);
  /// Has two keys change places, with what is in flight on either.
  void exchange(const std::string& key, const std::string& other);
  bool contains(const std::string& key);
  std::uint64_t nbytes(const std::string& key);
  std::vector<std::string> keys();
  /// These two ask no file system and wait for no call that does: for every step of a training.
  StoreStats stats();
  std::vector<VolumeStats> volume_stats();
  /// Bytes that may still be reserved. Asks the file systems; throws StoreError where one does not
  /// answer.
  std::uint64_t available_bytes();

  /// Takes `nbytes` of host memory for checksums ahead, where any are kept; others go on meanwhile.
  void provide_checksums(std::uint64_t nbytes);
  /// Sets what to do about corrupted data, for the messages of errors.
  void set_recovery(const std::string& recovery);

  /// That of the first volume; the reason names the volumes that have another.
  const std::string& engine_name() const noexcept { return engine_name_; }
  const std::string& engine_reason() const noexcept { return engine_reason_; }
  const std::string& engine_description() const noexcept { return engine_description_; }
  Alignment alignment() const noexcept { return space_.alignment(); }
  /// No page cache on any volume.
  bool direct() const noexcept { return direct_; }

  /// As a program ends: the silence of a device, which may use memory still, is an error of waits.
  void end_patience() noexcept { ending_ = true; }
  /// Waits for everything in flight and gives all space back. Later calls but close() are refused.
  /// Does nothing in a forked child, and returns when the store is closed also where another thread
  /// closes it at the same time. Tells devices what they may forget; an exception of
  /// `while_waiting` ends that, and comes when the store is closed. When the wait is ended, the
  /// last owner does not wait again: the store, its threads and the memory in flight are left to
  /// the end of the process.
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
  std::mutex space_mutex_;  // of what is taken; never locked together with mutex_
  Space space_;
  std::shared_ptr<void> bounce_hold_;
  std::string engine_name_;
  std::string engine_reason_;
  std::string engine_description_;
  const std::function<void(const std::string&)> report_;
  const bool direct_;
  std::atomic<bool> ending_ = false;
  const std::uint64_t block_bytes_;

  std::mutex mutex_;  // what follows
  std::map<std::string, std::unique_ptr<Entry>> entries_;
  std::vector<std::shared_ptr<void>> retired_holds_;  // of transfers that are over
  std::size_t job_count_ = 0;
  std::size_t space_call_count_ = 0;  // of calls that are inside space_
  std::size_t giving_count_ = 0;      // of them, those that give something back
  std::uint64_t given_count_ = 0;     // of calls that have given something back
  std::condition_variable quiet_;     // a transfer or a space call ended while somebody waits
  std::size_t quiet_waiter_count_ = 0;
  std::chrono::steady_clock::duration wait_time_{};
  std::string recovery_ = "start again from data that is known to be good";
  bool closed_ = false;
  bool abandoned_ = false;
  std::thread::id closer_;  // ends the threads and gives the space back
  bool ended_ = false;      // that is over

  std::shared_ptr<TransferQueue> queue_;  // last: its thread uses all of the above
};

}  // namespace memascend
