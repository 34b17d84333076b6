// What the Python side sees of the machine.
#include "generator.h"
#include "host_watch.h"
#include "machine.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Generator.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fakeacc {

namespace {

namespace py = pybind11;

CheckerMode to_mode(const std::string& name) {
  if (name == "off") {
    return CheckerMode::off;
  }
  if (name == "collect") {
    return CheckerMode::collect;
  }
  if (name == "raise") {
    return CheckerMode::raise;
  }
  throw py::value_error("the checker is off, collect or raise, not " + name);
}

std::vector<std::tuple<std::string, std::string, std::string>> reports() {
  std::vector<std::tuple<std::string, std::string, std::string>> result;
  for (const auto& report : Machine::get().reports()) {
    result.emplace_back(report.message, report.operation, report.other);
  }
  return result;
}

std::pair<int64_t, int64_t> requested_bytes(int device) {
  return Machine::get().with_heap(device, [](Heap& heap) {
    return std::pair{heap.stats.requested_bytes.current, heap.stats.requested_bytes.peak};
  });
}

size_t set_limit_bytes(int device, size_t bytes) {
  return Machine::get().with_heap(
      device, [bytes](Heap& heap) { return std::exchange(heap.limit_bytes, bytes); });
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](int devices) { Machine::get().start(devices); });
  m.def("device_count", [] { return Machine::get().device_count(); });
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator(device)));
  });
  m.def("hold", [](int device, int64_t id) { Machine::get().stream(device, id).hold(); });
  m.def("release", [](int device, int64_t id) { Machine::get().stream(device, id).release(); });
  m.def(
      "set_latency",
      [](double kernel_ms, double copy_ms, double copy_ms_per_mib, double jitter_ms,
         uint64_t seed) {
        Machine::get().set_latency({kernel_ms, copy_ms, copy_ms_per_mib, jitter_ms}, seed);
      });
  m.def("set_checker", [](const std::string& mode) { Machine::get().set_checker(to_mode(mode)); });
  m.def("set_host_watch", &set_host_watch);
  m.def("set_poison", [](bool on) { Machine::get().set_poison(on); });
  m.def("reports", &reports);
  m.def("clear_reports", [] { Machine::get().clear_reports(); });
  m.def("check_host_access", [](const std::string& what, uintptr_t begin, size_t bytes, bool write) {
    Machine::get().check_host_access(what, {begin, bytes, write});
  });
  m.def("requested_bytes", &requested_bytes);
  m.def("set_limit_bytes", &set_limit_bytes);
  m.def("synchronize_device", [](int device) { Machine::get().synchronize_device(device); });
}

} // namespace fakeacc
