// Tensors of the device: storage, shapes, views. Everything else is in operators.cpp.
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "sim.hpp"

namespace sim {

const c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  use_device(device);
  TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, &device_memory(), kKeys, type, format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool> pin) {
  use_device(device);
  TORCH_CHECK(!pin.value_or(false), "only host memory can be pinned");
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), kKeys, type);
}

void resize_storage(c10::StorageImpl* storage, std::size_t nbytes) {
  c10::DataPtr fresh = device_memory().allocate(nbytes);
  const std::size_t kept = std::min(nbytes, storage->nbytes());
  char* to = static_cast<char*>(fresh.get());
  const char* from = static_cast<const char*>(storage->data());
  if (kept > 0 && from != nullptr) {
    launch("resize", {{from, from + kept, false}, {to, to + kept, true}},
           [=] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (format.value_or(at::MemoryFormat::Contiguous) != at::MemoryFormat::Contiguous) {
    impl->empty_tensor_restride(*format);
  }
  const std::size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && storage->nbytes() < needed) resize_storage(storage, needed);
  return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<std::int64_t> begin;
  if (offset.has_value()) begin = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), begin);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset.expect_int(),
                                      C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::Storage fresh(c10::Storage::use_byte_size_t(), 0, &device_memory(), true);
  return at::native::set_storage_cpu_(self, fresh, 0, {0}, {});
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (!self.is_same(source)) copy_between(self, source, non_blocking);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  copy_between(target, self, non_blocking);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) target.resize_(self.sizes());
  copy_between(target, self, false);
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  launch("item", {use_of(self, false)},
         [to = host.data_ptr(), from = self.const_data_ptr(), nbytes = host.nbytes()] {
           std::memcpy(to, from, nbytes);
         });
  synchronize(current(), "item()");
  return host.item();
}

bool has_compatible_type(const at::Tensor&, const at::Tensor& from) {
  return from.layout() == at::kStrided;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("view.dtype", at::native::view_dtype);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
}

}  // namespace sim
