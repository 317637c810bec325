#include "nvme/store.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/align.hpp"
#include "base/check.hpp"
#include "nvme/store_call.hpp"

namespace memascend {

struct Store::Entry {
  std::string key;
  std::uint64_t nbytes = 0;
  std::vector<Extent> extents;
  std::vector<std::unique_ptr<Job>> jobs;  // in flight, oldest first
  std::optional<ErrorPlace> broken;        // a write failed: the contents are undefined
};

/// A transfer and what must wait for it.
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
  // A forked child has neither the store's thread nor its place in the ring: its copy is left as it
  // is, for the process's end to clean up.
  return std::shared_ptr<Store>(new Store(std::move(options), std::move(volumes)),
                                [owner = ::getpid()](Store* store) {
                                  if (::getpid() == owner && !store->abandoned_) delete store;
                                });
}

Store::Store(StoreOptions options, std::vector<Volume> volumes)
    : owner_process_(::getpid()),
      checksums_(options.verify == Verify::kOff
                     ? nullptr
                     : std::make_unique<Checksums>(volumes.size(), options.checksum_memory)),
      space_(std::move(volumes), {options.grow_bytes,
                                  options.stripe_bytes > 0 ? options.stripe_bytes
                                                           : std::max(SpaceOptions().stripe_bytes,
                                                                      options.transfer.chunk_bytes),
                                  weights_of(options.volumes), checksums_.get()}),
      bounce_hold_(std::move(options.bounce_hold)),
      direct_(std::all_of(space_.volumes().begin(), space_.volumes().end(),
                          [](const Volume& volume) { return volume.direct(); })),
      block_bytes_(space_.alignment().offset_bytes) {
  options.transfer.weights = weights_of(options.volumes);
  options.transfer.checksums = checksums_.get();
  options.transfer.read_back = options.verify == Verify::kFull;
  queue_ = std::make_shared<TransferQueue>(
      make_engines(options), space_.volumes(), space_.alignment(), options.transfer,
      [this](std::span<Transfer* const> transfers) { finished(transfers); });
  engine_description_ = queue_->engine_description();
}

// An engine for each volume; what serves one need not serve another.
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

Store::~Store() {
  try {
    close();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memascend: closing a store: %s\n", error.what());
  }
}

void Store::reserve(const std::string& key, std::uint64_t nbytes) {
  LockedCall call(*this);
  call.expect_open();
  reserve_locked(call, key, nbytes);
}

void Store::reserve_locked(LockedCall& call, const std::string& key, std::uint64_t nbytes) {
  const auto present = entries_.find(key);
  if (present != entries_.end() && present->second->nbytes == nbytes) return;
  Entry* old = wait_until_quiet(call, key);
  // Another thread may have made it meanwhile, and written to it.
  if (old != nullptr && old->nbytes == nbytes) return;
  // The new room is found before the old is given back, so that a full volume changes nothing.
  auto entry = std::make_unique<Entry>();
  entry->key = key;
  entry->nbytes = nbytes;
  if (nbytes > 0) entry->extents = space_.take(key, nbytes);
  if (old != nullptr) space_.give(old->extents);
  entries_[key] = std::move(entry);
}

std::shared_ptr<Ticket> Store::write(const std::string& key, std::uint64_t nbytes, Memory source,
                                     std::optional<std::uint64_t> offset) {
  LockedCall call(*this);
  call.expect_open();
  if (!offset) reserve_locked(call, key, nbytes);
  Entry& entry = find(key);
  return start(entry,
               {Operation::kWrite, entry.nbytes, offset.value_or(0), nbytes, source.data,
                std::max(nbytes, source.capacity_bytes)},
               std::move(source.hold));
}

std::shared_ptr<Ticket> Store::read(const std::string& key, std::uint64_t nbytes, Memory target,
                                    std::uint64_t offset) {
  LockedCall call(*this);
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
  std::vector<Job*> over;  // grows: a failed write also ends the reads that waited for it
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
  const bool done = ticket.done() || call.wait(ticket.finished_, &ticket.waiter_count_, timeout,
                                               [&] { return ticket.done(); });
  if (done && ticket.error_) {
    throw_store_error(describe(ticket.operation_, *ticket.error_, recovery_), *ticket.error_);
  }
  return done;
}

// Lets what somebody waits for go first, with all that it has to follow.
void Store::hurry(const Entry& entry, const Transfer* last) {
  for (const auto& job : entry.jobs) {
    queue_->hurry(job.get());
    if (job.get() == last) return;
  }
}

bool Store::wait_all(std::chrono::milliseconds timeout) {
  LockedCall call(*this);
  return call.wait(quiet_, &quiet_waiter_count_, timeout, [&] { return job_count_ == 0; });
}

// The entry of `key` once nothing is in flight on it, or nullptr when there is none (any more).
Store::Entry* Store::wait_until_quiet(LockedCall& call, const std::string& key) {
  const auto find_entry = [&]() -> Entry* {
    const auto place = entries_.find(key);
    return place == entries_.end() ? nullptr : place->second.get();
  };
  Entry* entry = find_entry();
  if (entry == nullptr || entry->jobs.empty()) return entry;
  hurry(*entry, nullptr);
  call.wait(quiet_, &quiet_waiter_count_, kForever, [&] {
    entry = find_entry();
    return entry == nullptr || entry->jobs.empty();
  });
  call.expect_open();
  return entry;
}

bool Store::discard(const std::string& key) {
  LockedCall call(*this);
  call.expect_open();
  const Entry* entry = wait_until_quiet(call, key);
  if (entry == nullptr) return false;
  space_.give(entry->extents);
  entries_.erase(key);
  return true;
}

Store::Entry& Store::find(const std::string& key) {
  const auto place = entries_.find(key);
  if (place != entries_.end()) return *place->second;
  throw StoreError(
      join("no key \"", key, "\" in the store (", entries_.size(), " keys)\n",
           "likely cause: it was never written, or discarded\n", "fix: reserve or write it first"),
      {key, space_.volumes().front().directory(), 0, 0, ENOENT});
}

bool Store::contains(const std::string& key) {
  LockedCall call(*this);
  call.expect_open();
  return entries_.contains(key);
}

std::uint64_t Store::nbytes(const std::string& key) {
  LockedCall call(*this);
  call.expect_open();
  return find(key).nbytes;
}

std::vector<std::string> Store::keys() {
  LockedCall call(*this);
  call.expect_open();
  std::vector<std::string> names;
  for (const auto& [key, entry] : entries_) names.push_back(key);
  return names;
}

bool Store::close_within(std::chrono::milliseconds timeout) {
  if (::getpid() == owner_process_ && !wait_all(timeout)) return false;
  close();
  return true;
}

void Store::close() {
  if (::getpid() != owner_process_) return;
  std::shared_ptr<TransferQueue> queue;
  {
    LockedCall call(*this);
    closed_ = true;
    call.wait(quiet_, &quiet_waiter_count_, kForever, [this] { return job_count_ == 0; });
    queue = std::move(queue_);
  }
  if (queue == nullptr) return;  // closed before
  queue.reset();                 // ends the thread and the engine, which know the files
  const LockedCall call(*this);
  entries_.clear();
  space_.close();
  checksums_.reset();
  retired_holds_.push_back(std::move(bounce_hold_));  // dropped on leaving, without the lock
}

}  // namespace memascend
