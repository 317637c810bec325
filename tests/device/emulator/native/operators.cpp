// Every other operator: ATen's CPU kernel, run later on the stream where its results' shapes can be
// known ahead (from the meta device), else at once, with the host waiting as CUDA's would.
#include <torch/library.h>

#include "sim.hpp"

namespace sim {

using torch::jit::Stack;

// -- what an operator's schema says -------------------------------------------------------------

struct Plan {
  bool is_random = false;
  bool gives_views = false;
  bool gives_tensors = true;  // alone, or lists of them
  bool is_product = false;    // of matrices, or batches of them
  std::vector<bool> writes;   // by argument
  std::vector<int> returned;  // by result: the argument that comes back, or -1
};

bool draws_numbers(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    auto type = argument.type();
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) return true;
  }
  return schema.name().find("dropout") != std::string::npos || schema.name() == "aten::bernoulli";
}

bool multiplies_matrices(const std::string& name) {
  for (const char* one : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}) {
    if (name == one) return true;
  }
  return false;
}

bool holds_tensors(const c10::TypePtr& type) {
  if (type->kind() != c10::TypeKind::ListType) return type->kind() == c10::TypeKind::TensorType;
  return type->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType;
}

int argument_of(const c10::FunctionSchema& schema, const c10::AliasInfo& result) {
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* info = arguments[i].alias_info();
    if (info != nullptr && info->beforeSets() == result.beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

Plan make_plan(const c10::FunctionSchema& schema) {
  Plan plan;
  plan.is_random = draws_numbers(schema);
  plan.is_product = multiplies_matrices(schema.name());
  for (const auto& argument : schema.arguments()) {
    const auto* info = argument.alias_info();
    plan.writes.push_back(info != nullptr && info->isWrite());
  }
  for (const auto& result : schema.returns()) {
    const auto* info = result.alias_info();
    plan.returned.push_back(info == nullptr ? -1 : argument_of(schema, *info));
    plan.gives_views |= info != nullptr && !info->isWrite();
    plan.gives_tensors &= holds_tensors(result.type());
  }
  return plan;
}

const Plan& plan_of(const c10::FunctionSchema& schema) {
  static std::mutex mutex;
  static auto* plans = new std::map<const c10::FunctionSchema*, Plan>;
  const std::lock_guard lock(mutex);
  const auto found = plans->find(&schema);
  if (found != plans->end()) return found->second;
  return plans->emplace(&schema, make_plan(schema)).first->second;
}

// -- values -------------------------------------------------------------------------------------

template <typename Change>
c10::IValue each_tensor(const c10::IValue& value, Change change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& t : value.toTensorVector()) made.push_back(t.defined() ? change(t) : t);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& t : value.toOptionalTensorVector()) {
      const bool is_there = t.has_value() && t->defined();
      made.push_back(is_there ? std::optional<at::Tensor>(change(*t)) : t);
    }
    return made;
  }
  return value;
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> all;
  each_tensor(value, [&](const at::Tensor& t) {
    all.push_back(t);
    return t;
  });
  return all;
}

/// A CPU argument as it is now.
at::Tensor frozen(const at::Tensor& tensor) {
  at::Tensor copy = tensor.clone();
  const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  copy.unsafeGetTensorImpl()->set_wrapped_number(is_number);
  return copy;
}

at::Tensor like(const at::Tensor& shape, c10::Device device) {
  const auto options = shape.options().device(device).requires_grad(false);
  return at::empty_strided(shape.sizes(), shape.strides(), options);
}
at::Tensor on_sim(const at::Tensor& shape) { return like(shape, own()); }

bool is_narrow(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// -- one call -----------------------------------------------------------------------------------

struct Call {
  const c10::OperatorHandle& op;
  const Plan& plan;
  std::string name;
  std::vector<c10::IValue> arguments;
  Stack on_cpu;  // the arguments again, as aliases
  std::vector<Use> uses;

  Stack run() const {
    Stack stack = on_cpu;
    if (plan.is_product) widen(stack);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (std::size_t r = 0; plan.is_product && r < stack.size(); ++r) {
      if (plan.returned[r] < 0) continue;
      const at::Tensor target = on_cpu[plan.returned[r]].toTensor();
      if (is_narrow(target)) stack[r] = target.copy_(stack[r].toTensor());
    }
    return stack;
  }

  /// Has products of 16 bits computed in fp32: many CPUs cannot multiply in 16 bits, and ATen's
  /// loops that stand for it do a hundredth of the operations in a second.
  static void widen(Stack& stack) {
    for (auto& value : stack) {
      value = each_tensor(value,
                          [](const at::Tensor& t) { return is_narrow(t) ? t.to(at::kFloat) : t; });
    }
  }
};

Call take_call(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->end() - static_cast<std::int64_t>(schema.arguments().size());
  Call call{
      op, plan_of(schema), schema.name() + "." + schema.overload_name(), {begin, stack->end()}};
  stack->erase(begin, stack->end());
  return call;
}

void alias_arguments(Call& call) {
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    const bool is_write = call.plan.writes[i];
    if (call.arguments[i].isDevice()) {
      call.on_cpu.push_back(c10::Device(at::kCPU));
      continue;
    }
    call.on_cpu.push_back(each_tensor(call.arguments[i], [&](const at::Tensor& t) {
      if (!is_sim(t)) return is_write ? t : frozen(t);
      call.uses.push_back(use_of(t, is_write));
      return alias_of(t);
    }));
  }
}

/// Whether everything written is on the device; or also whether it has its shape already.
bool writes_sim(const Call& call, bool with_shape) {
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    if (!call.plan.writes[i]) continue;
    for (const auto& t : tensors_in(call.arguments[i])) {
      if (!is_sim(t) || (with_shape && t.numel() == 0)) return false;
    }
  }
  return true;
}

/// The operator on the meta device; empty when it cannot run there.
Stack shapes_of(const Call& call) {
  Stack stack;
  for (const auto& argument : call.arguments) {
    if (argument.isDevice()) {
      stack.push_back(c10::Device(at::kMeta));
      continue;
    }
    stack.push_back(each_tensor(argument, [](const at::Tensor& t) {
      return is_sim(t) ? like(t, c10::Device(at::kMeta)) : t;
    }));
  }
  try {
    call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return {};
  }
  return stack;
}

/// Makes the results, still to be filled; false when their shapes cannot be known ahead.
bool make_results(const Call& call, Stack& results) {
  const Plan& plan = call.plan;
  const auto& returned = plan.returned;
  if (plan.is_random || !plan.gives_tensors || !writes_sim(call, false)) return false;
  if (!call.op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
  const bool gives_new = std::find(returned.begin(), returned.end(), -1) != returned.end();
  if (returned.empty() || (!gives_new && writes_sim(call, true))) {
    for (const int source : returned) results.push_back(call.arguments[source]);
    return true;
  }
  const Stack shapes = shapes_of(call);
  if (shapes.size() != returned.size()) return false;
  for (std::size_t r = 0; r < shapes.size(); ++r) {
    if (returned[r] < 0) {
      results.push_back(each_tensor(shapes[r], on_sim));
      continue;
    }
    const at::Tensor& target = call.arguments[returned[r]].toTensor();
    const auto sizes = shapes[r].toTensor().sizes();
    if (target.sizes() != sizes) target.resize_(sizes);
    results.push_back(target);
  }
  return true;
}

/// The memory of a call's tensors. Not these themselves: no GPU's queue keeps a graph alive.
std::vector<c10::Storage> memory_of(const Call& call) {
  std::vector<c10::Storage> all;
  for (const auto& argument : call.arguments) {
    for (const auto& t : tensors_in(argument)) all.push_back(t.storage());
  }
  return all;
}

void run_later(Call call, const Stack& results) {
  // A queue that keeps it finds more mistakes, and holds memory that a GPU would use again.
  std::vector<c10::Storage> kept;
  if (poisons_and_sums) kept = memory_of(call);
  call.arguments.clear();
  std::vector<std::vector<at::Tensor>> targets(results.size());
  for (std::size_t r = 0; r < results.size(); ++r) {
    if (call.plan.returned[r] >= 0) continue;
    for (const auto& t : tensors_in(results[r])) {
      call.uses.push_back(use_of(t, true));
      targets[r].push_back(alias_of(t));
    }
  }
  launch(call.name, call.uses, [call, targets, kept]() mutable {
    const Stack given = call.run();
    for (std::size_t r = 0; r < targets.size(); ++r) {
      if (targets[r].empty()) continue;
      const auto got = tensors_in(given[r]);
      TORCH_CHECK(got.size() == targets[r].size(), call.name, " differs from its meta kernel");
      for (std::size_t i = 0; i < got.size(); ++i) targets[r][i].copy_(got[i]);
    }
  });
}

void run_now(const Call& call, Stack* stack) {
  launch(call.name, call.uses, [] {});
  synchronize(current(), ("operator " + call.name).c_str());
  const Stack given = call.run();
  for (std::size_t r = 0; r < given.size(); ++r) {
    const int source = call.plan.returned[r];
    if (source < 0) {
      stack->push_back(each_tensor(given[r], [](const at::Tensor& t) {
        at::Tensor made = on_sim(t);
        if (t.numel() == 0) return made;
        launch("result", {use_of(made, true)}, [to = alias_of(made), t]() mutable { to.copy_(t); });
        return made;
      }));
      continue;
    }
    const at::Tensor before = call.arguments[source].toTensor(), after = given[r].toTensor();
    if (is_sim(before) && (before.sizes() != after.sizes() || before.numel() == 0)) {
      before.resize_(after.sizes());
      copy_between(before, after, true);
    }
    stack->push_back(call.arguments[source]);
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call = take_call(op, stack);
  TORCH_CHECK(!call.plan.gives_views, "sim: ", call.name, " returns a view and has no kernel");
  const at::AutoDispatchBelowADInplaceOrView below;
  Stack results;
  const bool is_later = make_results(call, results);
  alias_arguments(call);
  if (!is_later) return run_now(call, stack);
  run_later(std::move(call), results);
  for (auto& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace sim
