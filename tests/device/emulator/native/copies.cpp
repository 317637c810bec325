// Copies between host and device, with the rules of cudaMemcpyAsync.
#include <chrono>
#include <thread>

#include "sim.hpp"

namespace sim {

constexpr std::size_t kStagedBytesMax = 64 << 10;  // pageable memory up to here is copied at once

bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

Use use_of(const at::Tensor& tensor, bool is_write) {
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  if (begin == nullptr || tensor.numel() == 0) return {begin, begin, is_write};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + (last + 1) * static_cast<std::int64_t>(tensor.element_size()), is_write};
}

at::Tensor alias_of(const at::Tensor& tensor) {
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0 || tensor.data_ptr() == nullptr) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

void check_device_locked(const Stream& on, const Use& use, const std::string& what) {
  Block* block = use.begin == use.end ? nullptr : block_of_locked(use.begin);
  if (block != nullptr) {
    check_locked(block->log, on, use.begin, use.end, use.is_write, what, "device");
  }
}

void launch(const std::string& name, const std::vector<Use>& uses, std::function<void()> run) {
  use_runtime(name.c_str());
  Stream& on = current();
  const std::string what = name + " at " + site();
  {
    const std::lock_guard lock(state_mutex);
    tick_locked(on);
    for (const Use& use : uses) check_device_locked(on, use, what);
    on.push(Kind::kernel, std::move(run));
  }
  // The host learns nothing from it, so that races are found as ever.
  if (launches_block) wait_without_gil(record_marker(on));
}

void sleep_on_stream(double seconds) {
  launch("sleep", {}, [=] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}

/// One copy between host and device; both sides are contiguous.
struct Transfer {
  char* target;
  const char* source;
  std::size_t nbytes;
  bool to_device;

  const char* host() const { return to_device ? source : target; }
  const char* device() const { return to_device ? target : source; }
};

/// Reads or writes page-locked host memory when it runs, and tells if that changed meanwhile.
void push_pinned_locked(Stream& on, const Transfer& copy, const std::string& what) {
  const char* host = copy.host();
  const char* end = host + copy.nbytes;
  if (spans_registrations_locked(host, copy.nbytes)) {
    find_locked("a copy spans two registered ranges: " + what);
  }
  // What another pending copy writes changes for a good reason; so does what one still reads.
  const bool is_summed = poisons_and_sums && !overlaps_pending_locked(host, end, copy.to_device);
  if (is_summed && !copy.to_device) std::memset(copy.target, kPoison, copy.nbytes);
  const std::uint64_t sum = is_summed ? checksum(host, copy.nbytes) : 0;
  check_locked(host_log, on, host, end, !copy.to_device, what, "host");
  use_pinned_locked(host, on.id);
  on.push(Kind::copy, [=] {
    if (is_summed && checksum(host, copy.nbytes) != sum) {
      const std::lock_guard lock(state_mutex);
      find_locked("host memory changed under a pending " + what);
    }
    std::memcpy(copy.target, copy.source, copy.nbytes);
  });
}

void push_pageable_locked(Stream& on, const Transfer& copy) {
  if (!copy.to_device) {
    on.push(Kind::copy, [=] { std::memcpy(copy.target, copy.source, copy.nbytes); });
    return;
  }
  auto staged = std::make_shared<std::vector<char>>(copy.source, copy.source + copy.nbytes);
  on.push(Kind::copy, [=] { std::memcpy(copy.target, staged->data(), copy.nbytes); });
}

void transfer(const Transfer& copy, bool non_blocking) {
  if (copy.nbytes == 0) return;
  use_runtime(copy.to_device ? "h2d copy" : "d2h copy");
  Stream& on = current();
  const std::string what = (copy.to_device ? "h2d copy at " : "d2h copy at ") + site();
  std::unique_lock lock(state_mutex);
  const bool is_pinned = is_pinned_locked(copy.host(), copy.nbytes);
  if (!is_pinned && copy.to_device && copy.nbytes > kStagedBytesMax) {
    lock.unlock();
    synchronize(on, "pageable h2d");
    lock.lock();
  }
  tick_locked(on);
  const Use use{copy.device(), copy.device() + copy.nbytes, copy.to_device};
  check_device_locked(on, use, what);
  if (is_pinned) {
    push_pinned_locked(on, copy, what);
  } else {
    push_pageable_locked(on, copy);
  }
  lock.unlock();
  if (!is_pinned && !copy.to_device) {
    synchronize(on, "pageable d2h");
  } else if (!non_blocking && (pinned_copies_block || !is_pinned || !copy.to_device)) {
    synchronize(on, copy.to_device ? "blocking h2d" : "blocking d2h");
  }
}

void transfer(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  transfer(
      {static_cast<char*>(target.data_ptr()), static_cast<const char*>(source.const_data_ptr()),
       target.numel() * target.element_size(), is_sim(target)},
      non_blocking);
}

bool is_same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

void copy_between(const at::Tensor& target, const at::Tensor& given, bool non_blocking) {
  if (target.numel() == 0) return;
  const at::Tensor source = given.sizes() == target.sizes() ? given : given.expand_as(target);
  if (is_sim(target) && is_sim(source)) {
    launch("copy_", {use_of(source, false), use_of(target, true)},
           [to = alias_of(target), from = alias_of(source)]() mutable { to.copy_(from); });
    return;
  }
  if (is_same_layout(target, source)) return transfer(target, source, non_blocking);
  // As ATen's CUDA copy: casts on the device when non_blocking, else on the CPU; then a plain copy.
  constexpr auto kContiguous = at::MemoryFormat::Contiguous;
  at::Tensor to, from;
  if (is_sim(source) == non_blocking) {  // the source is where the cast is made
    to = target.is_contiguous() ? target : at::empty_like(target, kContiguous);
    from = source.to(target.scalar_type()).expand_as(target).contiguous();
  } else {
    const bool serves = target.is_contiguous() && target.scalar_type() == source.scalar_type();
    const auto options = target.options().dtype(source.scalar_type());
    to = serves ? target : at::empty_like(target, options, kContiguous);
    from = source.contiguous();
  }
  transfer(to, from, non_blocking);
  if (!to.is_same(target)) const_cast<at::Tensor&>(target).copy_(to, non_blocking);
}

}  // namespace sim
