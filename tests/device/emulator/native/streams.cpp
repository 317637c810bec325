// Streams, events, and what the host waits for.
#include <thread>

#include "sim.hpp"

namespace sim {

void merge(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreamsMax; ++i) into[i] = std::max(into[i], other[i]);
}

// -- events -------------------------------------------------------------------------------------

void Marker::set() {
  const std::lock_guard lock(mutex_);
  is_done_ = true;
  time = now_ns();
  changed_.notify_all();
}

void Marker::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_done_; });
}

bool Marker::query() {
  const std::lock_guard lock(mutex_);
  return is_done_;
}

// -- errors: those of work that runs later come up at the next wait, as CUDA's do -----------------

std::mutex error_mutex;
std::string first_error;

void keep_error(int id, const char* text) {
  const std::lock_guard lock(error_mutex);
  if (first_error.empty()) first_error = text;
  fprintf(stderr, "sim: on stream %d: %s\n", id, text);
}

void raise_kept_error() {
  const std::lock_guard lock(error_mutex);
  if (first_error.empty()) return;
  const std::string text = std::exchange(first_error, "");
  TORCH_CHECK(false, "sim: a kernel failed earlier: ", text);
}

// -- streams ------------------------------------------------------------------------------------

std::atomic<std::uint64_t> delay_seed{0};

Stream::Stream(int id) : id(id), random_(delay_seed + id) {
  std::thread([this] { work(); }).detach();
}

void Stream::push(Kind kind, std::function<void()> run) {
  const std::lock_guard lock(mutex_);
  queue_.emplace_back(kind, std::move(run));
  changed_.notify_one();
}

void Stream::seed(std::uint64_t value) {
  const std::lock_guard lock(mutex_);
  random_.seed(value);
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !is_busy_;
}

Stream::Task Stream::next() {
  std::int64_t delay_us = 0;
  Task task;
  {
    std::unique_lock lock(mutex_);
    is_busy_ = false;
    changed_.wait(lock, [&] { return !queue_.empty(); });
    task = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    if (task.first == Kind::copy) delay_us = copy_delay_us;
    if (task.first == Kind::kernel) delay_us = kernel_delay_us;
    if (delay_us > 0) delay_us = random_() % 2 ? random_() % (delay_us + 1) : 0;
  }
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  return task;
}

void Stream::work() {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  for (;;) {
    const Task task = next();
    try {
      task.second();
    } catch (const std::exception& error) {
      keep_error(id, error.what());
    }
  }
}

std::mutex streams_mutex;
std::array<Stream*, kStreamsMax> streams{};  // never deleted: their threads outlive everything
int streams_made = 0;

Stream& stream_of(std::int64_t id) {
  const std::lock_guard lock(streams_mutex);
  Stream*& found = streams.at(id);
  if (found == nullptr) found = new Stream(static_cast<int>(id));
  return *found;
}

Stream& current() { return stream_of(current_id); }

std::vector<Stream*> all_streams() {
  const std::lock_guard lock(streams_mutex);
  std::vector<Stream*> made;
  std::copy_if(streams.begin(), streams.end(), std::back_inserter(made),
               [](auto* one) { return one; });
  return made;
}

/// Streams that nobody has any more are given out again, as CUDA's pool does.
std::int64_t new_stream() {
  const std::lock_guard lock(streams_mutex);
  return 1 + streams_made++ % (kStreamsMax - 1);
}

void set_delays(std::uint64_t seed, std::int64_t copy_us, std::int64_t kernel_us) {
  copy_delay_us = copy_us;
  kernel_delay_us = kernel_us;
  delay_seed = seed * 1000;
  for (Stream* one : all_streams()) one->seed(delay_seed + one->id);
}

// -- order --------------------------------------------------------------------------------------

void tick_locked(Stream& on) {
  merge(on.clock, host_clock);
  ++on.clock[on.id];
}

MarkerPtr record_marker(Stream& on) {
  auto marker = std::make_shared<Marker>();
  const std::lock_guard lock(state_mutex);
  tick_locked(on);
  marker->clock = on.clock;
  on.push(Kind::plain, [marker] { marker->set(); });
  return marker;
}

void learn(const MarkerPtr& marker) {
  const std::lock_guard lock(state_mutex);
  merge(host_clock, marker->clock);
}

void wait_without_gil(const MarkerPtr& marker) {
  if (PyGILState_Check()) {
    const py::gil_scoped_release released;
    marker->wait();
  } else {
    marker->wait();
  }
}

void host_wait(const MarkerPtr& marker, const char* why) {
  const std::string where = site();
  const std::uint64_t start = now_ns();
  wait_without_gil(marker);
  note_wait(why, where, now_ns() - start);
  learn(marker);
  raise_kept_error();
}

void synchronize(Stream& on, const char* why) { host_wait(record_marker(on), why); }

void synchronize_all(const char* why) {
  for (Stream* one : all_streams()) synchronize(*one, why);
}

}  // namespace sim
