// What is told at the end of a run: findings, and where the host waited.
#include "sim.hpp"

namespace sim {

std::map<std::pair<std::string, std::string>, Wait> waits;  // by reason and place
std::map<std::string, std::uint64_t> findings;

constexpr int kFramesShown = 4;

std::uint64_t now_ns() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

/// Frames that tell nothing of a place: every wait passes through these.
bool is_ours(const std::string& file) {
  return file.find("/torch/") != std::string::npos || file[0] == '<' ||
         file.find("/memascend/base/waiting.py") != std::string::npos ||
         file.find("/memascend/transfer/pending.py") != std::string::npos ||
         file.find("/memascend/transfer/transfer.py") != std::string::npos ||
         file.find("/device/emulator/") != std::string::npos;
}

/// A path from the package on.
std::string shortened(const std::string& file) {
  for (const std::string root : {"/site-packages/", "/memascend/", "/tests/"}) {
    const auto at = file.rfind(root);
    if (at != std::string::npos) {
      return file.substr(root[1] == 's' ? at + root.size() : at + 1);
    }
  }
  return file;
}

std::string site() {
  if (!Py_IsInitialized()) return "";
  const PyGILState_STATE gil = PyGILState_Ensure();
  std::string text;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int shown = 0; frame != nullptr && shown < kFramesShown;) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* name = PyUnicode_AsUTF8(code->co_filename);
    const std::string file = name != nullptr ? name : "?";
    if (!is_ours(file)) {
      if (shown++ > 0) text += " < ";
      text += shortened(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyErr_Clear();
  PyGILState_Release(gil);
  return text.empty() ? "(autograd's thread)" : text;
}

void note_wait(const std::string& why, const std::string& where, std::uint64_t nanoseconds) {
  const std::lock_guard lock(state_mutex);
  Wait& wait = waits[{why, where}];
  ++wait.count;
  wait.nanoseconds += nanoseconds;
}

void find_locked(const std::string& text) { ++findings[text]; }

using WaitRow = std::tuple<std::string, std::string, std::uint64_t, double>;

/// Reason, place, count and milliseconds; all of it is forgotten.
std::vector<WaitRow> take_waits() {
  const std::lock_guard lock(state_mutex);
  std::vector<WaitRow> rows;
  for (const auto& [key, wait] : std::exchange(waits, {})) {
    rows.emplace_back(key.first, key.second, wait.count, wait.nanoseconds / 1e6);
  }
  return rows;
}

std::map<std::string, std::uint64_t> take_findings() {
  const std::lock_guard lock(state_mutex);
  return std::exchange(findings, {});
}

}  // namespace sim
