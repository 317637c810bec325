#include "nvme/store.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"
#include "nvme/store_call.hpp"

namespace memascend {

namespace {

constexpr int kTakeTriesMax = 16;  // each retry needs space that another call has given back
constexpr std::chrono::seconds kDiscardReport{5};  // between two reports of a long discard

}  // namespace

struct Store::Entry {
  std::string key;
  std::uint64_t nbytes = 0;
  std::vector<Extent> extents;
  std::vector<std::unique_ptr<Job>> jobs;  // in flight, oldest first
  std::optional<ErrorPlace> broken;        // a write failed: the contents are undefined
};

/// A transfer and the transfers that must wait for it.
struct Store::Job : Transfer {
  Entry* entry = nullptr;
  std::uint64_t offset = 0;  // in the key, rounded out to blocks
  std::uint64_t end = 0;
  bool whole = false;  // covers the key
  std::shared_ptr<void> hold;
  std::shared_ptr<Ticket> ticket;
  std::vector<Job*> dependents;
  std::size_t blocker_count = 0;
};

std::shared_ptr<Store> Store::open(StoreOptions options) {
  const bool in_memory = options.engine == "memory";
  std::vector<Volume> volumes =
      open_volumes(options.volumes, in_memory ? options.engine_options.faults.get() : nullptr);
  return std::shared_ptr<Store>(new Store(std::move(options), std::move(volumes)), &Store::drop);
}

Store::Store(StoreOptions options, std::vector<Volume> volumes)
    : while_waiting_(std::move(options.while_waiting)),
      checksums_(options.verify == Verify::kOff
                     ? nullptr
                     : std::make_unique<Checksums>(volumes.size(), options.checksum_memory)),
      space_(std::move(volumes), {options.grow_bytes,
                                  options.stripe_bytes > 0 ? options.stripe_bytes
                                                           : std::max(SpaceOptions().stripe_bytes,
                                                                      options.transfer.chunk_bytes),
                                  weights_of(options.volumes), checksums_.get()}),
      bounce_hold_(std::move(options.bounce_hold)),
      report_(options.transfer.report),
      direct_(std::all_of(space_.volumes().begin(), space_.volumes().end(),
                          [](const Volume& volume) { return volume.direct(); })),
      block_bytes_(space_.alignment().offset_bytes) {
  options.transfer.weights = weights_of(options.volumes);
  for (const VolumeOptions& volume : options.volumes) options.transfer.cpus.push_back(volume.cpus);
  options.transfer.checksums = checksums_.get();
  options.transfer.read_back = options.verify == Verify::kFull;
  queue_ = std::make_shared<TransferQueue>(
      make_engines(options), space_.volumes(), space_.alignment(), options.transfer,
      [this](std::span<Transfer* const> transfers) { finished(transfers); });
  engine_description_ = queue_->engine_description();
}

// An engine for each volume; an engine that serves one volume may not serve another.
std::vector<std::unique_ptr<Engine>> Store::make_engines(const StoreOptions& options) {
  std::vector<std::unique_ptr<Engine>> engines;
  EngineOptions own = options.engine_options;
  for (std::size_t index = 0; index < options.volumes.size(); ++index) {
    own.volume_index = static_cast<int>(index);
    EngineChoice choice =
        make_engine(options.engine, own, options.volumes[index], space_.volumes()[index]);
    const std::string name = choice.engine->name();
    if (index == 0) {
      engine_name_ = name;
      engine_reason_ = choice.reason;
    } else if (name != engine_name_) {
      engine_reason_ += join("; ", name, " in ", options.volumes[index].path, ": ", choice.reason);
    }
    engines.push_back(std::move(choice.engine));
  }
  return engines;
}

Store::~Store() = default;

// The deleter of the last owner. A forked child has neither the store's threads nor its places in
// the rings: its copy is leaked, and so is a store that could not be closed.
void Store::drop(Store* store) noexcept {
  if (!store->owner_.is_current() || store->abandoned_) return;
  try {
    store->close();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memascend: closing a store: %s\n", error.what());
  }
  if (store->ended_) delete store;
}

void Store::reserve(const std::string& key, std::uint64_t nbytes) {
  LockedCall call(*this);
  call.expect_open();
  SpaceCall space(*this, call);
  reserve_locked(space, key, nbytes);
}

void Store::reserve_locked(SpaceCall& space, const std::string& key, std::uint64_t nbytes) {
  const auto is_there = [&] {
    const auto present = entries_.find(key);
    return present != entries_.end() && present->second->nbytes == nbytes;
  };
  if (is_there()) return;
  wait_until_quiet(space.locked(), key);
  // Take the new space before giving back the old, so that a full volume changes nothing.
  if (nbytes > 0 && !take(space, key, nbytes, is_there)) return;
  // Another thread may have created the key meanwhile, and transfers may have begun on it.
  wait_until_quiet(space.locked(), key);
  if (is_there()) return;
  auto entry = std::make_unique<Entry>();
  entry->key = key;
  entry->nbytes = nbytes;
  std::unique_ptr<Entry>& place = entries_[key];
  space.exchange(entry->extents);
  if (place != nullptr) space.exchange(place->extents);
  place = std::move(entry);
}

// Takes space; false if another thread has created the key with the last of it. Space that other
// calls are giving back counts as available, so a full volume is an error only if none comes back.
bool Store::take(SpaceCall& space, const std::string& key, std::uint64_t nbytes,
                 const std::function<bool()>& is_there) {
  for (int tries = 1;; ++tries) {
    const std::uint64_t given = given_count_;
    try {
      space.take(key, nbytes);
      return true;
    } catch (const StoreFullError&) {
      if (is_there()) return false;
      const bool comes_back = giving_count_ > 0 || given_count_ != given;
      if (!comes_back || tries == kTakeTriesMax) throw;
    }
    space.locked().wait(quiet_, &quiet_waiter_count_, [&] { return given_count_ != given; });
    space.locked().expect_open();
  }
}

std::shared_ptr<Ticket> Store::write(const std::string& key, std::uint64_t nbytes, Memory source,
                                     std::optional<std::uint64_t> offset, Busy busy) {
  LockedCall call(*this, busy);
  if (!call.entered()) return nullptr;
  call.expect_open();
  SpaceCall space(*this, call);  // until the transfer begins: keeps the key from a discard
  if (!offset) reserve_locked(space, key, nbytes);
  Entry& entry = find(key);
  return start(entry,
               {Operation::kWrite, entry.nbytes, offset.value_or(0), nbytes, source.data,
                std::max(nbytes, source.capacity_bytes)},
               std::move(source.hold));
}

std::shared_ptr<Ticket> Store::read(const std::string& key, std::uint64_t nbytes, Memory target,
                                    std::uint64_t offset, Busy busy) {
  const LockedCall call(*this, busy);
  if (!call.entered()) return nullptr;
  call.expect_open();
  Entry& entry = find(key);
  const bool rewritten = std::any_of(entry.jobs.begin(), entry.jobs.end(), [](const auto& job) {
    return job->whole && job->operation == Operation::kWrite;
  });
  if (entry.broken && !rewritten) {
    throw_store_error(join("cannot read \"", key, "\": an earlier write of it failed\n",
                           describe(Operation::kWrite, *entry.broken, recovery_)),
                      *entry.broken);
  }
  return start(entry,
               {Operation::kRead, entry.nbytes, offset, nbytes, target.data,
                std::max(nbytes, target.capacity_bytes)},
               std::move(target.hold));
}

std::shared_ptr<Ticket> Store::start(Entry& entry, const KeyRange& range,
                                     std::shared_ptr<void> hold) {
  MA_EXPECT(range.offset <= entry.nbytes && range.nbytes <= entry.nbytes - range.offset, "bytes ",
            range.offset, " to ", range.offset, "+", range.nbytes, " are not all in \"", entry.key,
            "\", which has ", entry.nbytes);
  MA_EXPECT(range.data != nullptr || range.nbytes == 0, "null address for \"", entry.key, "\"");
  auto ticket = std::make_shared<Ticket>(range.operation, range.nbytes);
  if (range.nbytes == 0) {
    ticket->done_ = true;
    return ticket;
  }
  auto job = std::make_unique<Job>();
  job->operation = range.operation;
  job->key = entry.key;
  job->pieces = cut(range, entry.extents, space_.alignment());
  job->entry = &entry;
  job->offset = align_down(range.offset, block_bytes_);
  job->end = align_up(range.offset + range.nbytes, block_bytes_);
  job->whole = range.nbytes == entry.nbytes;
  job->hold = std::move(hold);
  job->ticket = ticket;
  ticket->transfer_ = job.get();
  for (const auto& earlier : entry.jobs) {
    const bool overlap = job->offset < earlier->end && earlier->offset < job->end;
    const bool one_writes =
        job->operation == Operation::kWrite || earlier->operation == Operation::kWrite;
    if (!overlap || !one_writes) continue;
    earlier->dependents.push_back(job.get());
    ++job->blocker_count;
  }
  ++job_count_;
  entry.jobs.push_back(std::move(job));
  Job* started = entry.jobs.back().get();
  if (started->blocker_count == 0) queue_->submit(started);
  return ticket;
}

void Store::finished(std::span<Transfer* const> transfers) {
  const std::lock_guard lock(mutex_);
  std::vector<Job*> over;  // grows: a failed write also ends the reads that follow it
  for (Transfer* transfer : transfers) over.push_back(static_cast<Job*>(transfer));
  for (std::size_t index = 0; index < over.size(); ++index) finish(over[index], &over);
  if (quiet_waiter_count_ > 0) quiet_.notify_all();
}

void Store::finish(Job* job, std::vector<Job*>* over) {
  Entry& entry = *job->entry;
  if (job->operation == Operation::kWrite) {
    if (job->error) {
      entry.broken = job->error;
    } else if (job->whole) {
      entry.broken.reset();
    }
  }
  for (Job* dependent : job->dependents) {
    if (--dependent->blocker_count > 0) continue;
    if (dependent->operation == Operation::kRead && entry.broken) {
      dependent->error = entry.broken;
      over->push_back(dependent);
    } else {
      queue_->submit(dependent);
    }
  }
  Ticket& ticket = *job->ticket;
  ticket.transfer_ = nullptr;
  ticket.error_ = job->error;
  ticket.done_.store(true, std::memory_order_release);
  if (ticket.waiter_count_ > 0) ticket.finished_.notify_all();
  if (job->hold != nullptr) retired_holds_.push_back(std::move(job->hold));
  --job_count_;
  std::erase_if(entry.jobs, [job](const auto& other) { return other.get() == job; });
}

bool Store::wait(Ticket& ticket, std::chrono::milliseconds timeout) {
  LockedCall call(*this);
  if (ticket.transfer_ != nullptr) {
    hurry(*static_cast<Job*>(ticket.transfer_)->entry, ticket.transfer_);
  }
  const bool done =
      ticket.done() ||
      call.wait(ticket.finished_, &ticket.waiter_count_, [&] { return ticket.done(); }, timeout);
  if (done && ticket.error_) {
    throw_store_error(describe(ticket.operation_, *ticket.error_, recovery_), *ticket.error_);
  }
  return done;
}

bool Store::ended_well(const Ticket& ticket) {
  if (!ticket.done() || ticket.error_) return false;
  const LockedCall call(*this, Busy::kReturn);  // drops the hold
  return call.entered();
}

// Moves a transfer, and all earlier ones on its key, ahead of transfers that no caller waits for.
void Store::hurry(const Entry& entry, const Transfer* last) {
  for (const auto& job : entry.jobs) {
    queue_->hurry(job.get());
    if (job.get() == last) return;
  }
}

void Store::wait_all() {
  LockedCall call(*this);
  call.wait(quiet_, &quiet_waiter_count_, [&] { return job_count_ == 0; });
}

// Returns the entry of `key` once it has nothing in flight, or nullptr if there is none (any more).
Store::Entry* Store::wait_until_quiet(LockedCall& call, const std::string& key) {
  const auto find_entry = [&]() -> Entry* {
    const auto place = entries_.find(key);
    return place == entries_.end() ? nullptr : place->second.get();
  };
  Entry* entry = find_entry();
  if (entry == nullptr || entry->jobs.empty()) return entry;
  hurry(*entry, nullptr);
  call.wait(quiet_, &quiet_waiter_count_, [&] {
    entry = find_entry();
    return entry == nullptr || entry->jobs.empty();
  });
  call.expect_open();
  return entry;
}

bool Store::discard(const std::string& key) {
  LockedCall call(*this);
  call.expect_open();
  SpaceCall space(*this, call);
  Entry* entry = wait_until_quiet(call, key);
  if (entry == nullptr) return false;
  space.exchange(entry->extents);
  entries_.erase(key);
  return true;
}

void Store::shrink() {
  LockedCall call(*this);
  call.expect_open();
  SpaceCall(*this, call).shrink();
}

void Store::exchange(const std::string& key, const std::string& other) {
  const LockedCall call(*this);
  call.expect_open();
  Entry& one = find(key);
  Entry& two = find(other);
  MA_EXPECT(one.nbytes == two.nbytes, "\"", key, "\" has ", one.nbytes, " bytes and \"", other,
            "\" ", two.nbytes, ": they cannot change places");
  std::swap(one.key, two.key);
  std::swap(entries_[key], entries_[other]);
}

Store::Entry& Store::find(const std::string& key) {
  const auto place = entries_.find(key);
  if (place != entries_.end()) return *place->second;
  throw StoreError(
      join("no key \"", key, "\" in the store (", entries_.size(), " keys)\n",
           "likely cause: it was never written, or discarded\n", "fix: reserve or write it first"),
      {key, space_.volumes().front().directory(), 0, 0, ENOENT});
}

std::uint64_t Store::nbytes(const std::string& key) {
  LockedCall call(*this);
  call.expect_open();
  return find(key).nbytes;
}

void Store::close() {
  if (!owner_.is_current()) return;
  std::shared_ptr<TransferQueue> queue;
  {
    LockedCall call(*this);
    closed_ = true;
    if (queue_ != nullptr) {
      abandoned_ = true;  // if the wait below ends with an exception
      call.wait(quiet_, &quiet_waiter_count_,
                [this] { return job_count_ == 0 && space_call_count_ == 0; });
      abandoned_ = false;
    }
    // A signal handler may call close() again on the thread that is closing the store.
    if (closer_ == std::this_thread::get_id()) return;
    if (queue_ == nullptr) {  // another thread is closing it, or has closed it
      call.wait(quiet_, &quiet_waiter_count_, [this] { return ended_; });
      return;
    }
    closer_ = std::this_thread::get_id();
    queue = std::move(queue_);
  }
  queue.reset();  // ends the threads and the engines, which use the files
  std::exception_ptr interrupted;
  try {
    discard_space();
  } catch (...) {  // Ctrl-C: skip the rest of the discard, but close
    interrupted = std::current_exception();
  }
  space_.close();
  {
    const LockedCall call(*this);
    entries_.clear();
    checksums_.reset();
    retired_holds_.push_back(std::move(bounce_hold_));  // dropped at the end, without the lock
    closer_ = {};
    ended_ = true;
    quiet_.notify_all();
  }
  if (interrupted) std::rethrow_exception(interrupted);
}

// Pre: closed, with no call in the space. A drive may take minutes.
void Store::discard_space() {
  auto reported_at = std::chrono::steady_clock::now();
  space_.discard([&](const std::string& path, std::uint64_t done, std::uint64_t all) {
    const auto now = std::chrono::steady_clock::now();
    if (done < all && now - reported_at >= kDiscardReport) {
      reported_at = now;
      report_(join("closing ", path, ": the drive is told to forget what was stored, ", done >> 30,
                   " of ", all >> 30,
                   " GiB so far; Ctrl-C leaves the rest undone, which is harmless"));
    }
    if (while_waiting_) while_waiting_();
  });
}

}  // namespace memascend
