// Collectives as kernels of the current stream; gloo exchanges there, where there are several
// ranks.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "sim.hpp"

namespace sim {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Tensors = std::vector<at::Tensor>;

/// What runs on the stream. Lists hold one tensor per rank where a collective speaks of several.
struct Collective {
  std::string kind;
  Backend gloo;  // null for one rank
  int root;
  c10d::ReduceOp::RedOpType op;
  Tensors outs, ins;

  std::int64_t world() const { return gloo ? gloo->getSize() : 1; }
  std::int64_t rank() const { return gloo ? gloo->getRank() : 0; }

  void reduce(at::Tensor& whole) const {
    const bool averages = op == c10d::ReduceOp::AVG;  // gloo has none
    c10d::AllreduceOptions options;
    options.reduceOp = averages ? c10d::ReduceOp::SUM : op;
    Tensors one{whole};
    if (gloo) gloo->allreduce(one, options)->wait();
    if (averages) whole.div_(world());
  }
  void allreduce() {
    for (auto& out : outs) {
      at::Tensor whole = out.contiguous();
      reduce(whole);
      if (!whole.is_same(out)) out.copy_(whole);
    }
  }
  void broadcast() {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    for (auto& out : outs) {
      Tensors one{out.contiguous()};
      if (gloo) gloo->broadcast(one, options)->wait();
      if (!one[0].is_same(out)) out.copy_(one[0]);
    }
  }
  void copy() { outs[0].view(-1).copy_(ins[0].reshape(-1)); }
  void allgather() {  // `outs`: one per rank, or one that holds all
    if (world() == 1) return copy();
    at::Tensor mine = ins[0].contiguous().view(-1);
    at::Tensor all = at::empty({world() * mine.numel()}, mine.options());
    gloo->_allgather_base(all, mine)->wait();
    const std::int64_t part = all.numel() / static_cast<std::int64_t>(outs.size());
    for (std::size_t i = 0; i < outs.size(); ++i)
      outs[i].view(-1).copy_(all.narrow(0, i * part, part));
  }
  void reduce_scatter() {  // `ins`: one per rank, or one that holds all
    if (world() == 1) return copy();
    Tensors parts;
    for (auto& in : ins) parts.push_back(in.reshape(-1));
    at::Tensor whole = at::cat(parts).clone();
    reduce(whole);
    outs[0].view(-1).copy_(whole.narrow(0, rank() * outs[0].numel(), outs[0].numel()));
  }
  void run() {
    if (kind == "allreduce") return allreduce();
    if (kind == "broadcast") return broadcast();
    if (kind == "allgather") return allgather();
    if (kind == "reduce_scatter") return reduce_scatter();
    TORCH_CHECK(kind == "barrier", "no collective ", kind);
    if (gloo) gloo->barrier()->wait();
  }
};

Tensors as_cpu(const Tensors& given, bool is_write, std::vector<Use>& uses) {
  Tensors aliases;
  for (const auto& t : given) {
    uses.push_back(use_of(t, is_write));
    aliases.push_back(is_sim(t) ? alias_of(t) : t);
  }
  return aliases;
}

void collective(const std::string& kind, const Backend& gloo, const Tensors& outs,
                const Tensors& ins, int root, int op) {
  std::vector<Use> uses;
  Tensors from = as_cpu(ins, false, uses), to = as_cpu(outs, true, uses);
  const auto type = static_cast<c10d::ReduceOp::RedOpType>(op);
  Collective work{kind, gloo, root, type, std::move(to), std::move(from)};
  launch("collective " + kind, uses, [work = std::move(work)]() mutable { work.run(); });
}

}  // namespace sim
