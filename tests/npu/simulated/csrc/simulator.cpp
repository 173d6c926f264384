// A simulated `npu` for torch's CPU build: real PrivateUse1 tensors whose memory is
// host memory, with an account per device. This file is what Python sees of it.
#include "kernels.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace simulated {

void set_devices(const std::vector<size_t>& total_bytes) {
  auto lock = locked();
  for (const auto& device : state().devices) {
    TORCH_CHECK(
        device.allocated.current == 0, "tensors are still alive on the simulated npu");
  }
  state().devices.assign(total_bytes.size(), DeviceState());
  for (size_t index = 0; index < total_bytes.size(); ++index) {
    state().devices[index].total_bytes = total_bytes[index];
  }
}

DeviceState& device(int index) {
  check_index(static_cast<c10::DeviceIndex>(index));
  return state().devices[index];
}

void set_limit(int index, size_t bytes) {
  auto lock = locked();
  device(index).total_bytes = bytes;
}

void set_used_by_others(int index, size_t bytes) {
  auto lock = locked();
  device(index).bytes_used_by_others = bytes;
}

void set_op_seconds(double seconds) {
  state().operator_microseconds = static_cast<int64_t>(seconds * 1e6);
}

void fail_next(std::string op, std::string message, int times) {
  auto lock = locked();
  state().fault = {std::move(op), std::move(message), times};
}

std::map<std::string, int64_t> op_calls() {
  auto lock = locked();
  return state().operator_calls;
}

void reset_counters() {
  auto lock = locked();
  state().operator_calls.clear();
  for (auto& device : state().devices) {
    device.to_device = device.to_host = device.within_device = {};
    device.operators = device.synchronizations = device.out_of_memory = 0;
  }
}

std::map<std::string, int64_t> counters(int index) {
  auto lock = locked();
  const auto& counted = device(index);
  return {
      {"to_device", counted.to_device.count},
      {"to_device_bytes", counted.to_device.bytes},
      {"to_host", counted.to_host.count},
      {"to_host_bytes", counted.to_host.bytes},
      {"within_device", counted.within_device.count},
      {"within_device_bytes", counted.within_device.bytes},
      {"operators", counted.operators},
      {"synchronizations", counted.synchronizations},
      {"out_of_memory", counted.out_of_memory},
      {"allocated", counted.allocated.current},
      {"allocated_peak", counted.allocated.peak},
      {"reserved", counted.reserved.current},
  };
}

int get_current_device() { return current_device; }

void set_current_device(int index) {
  check_index(static_cast<c10::DeviceIndex>(index));
  current_device = static_cast<c10::DeviceIndex>(index);
}

}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  c10::SetAllocator(simulated::kNpu, simulated::device_allocator());
  at::setHostAllocator(simulated::kNpu, simulated::pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new simulated::Hooks());

  m.doc() = "Knobs and counters of the simulated devices; sizes are in bytes.";
  m.def("set_devices", &simulated::set_devices, py::arg("total_bytes"),
        "Start over with as many devices as sizes; no tensor may be alive.");
  m.def("set_limit", &simulated::set_limit, py::arg("index"), py::arg("bytes"),
        "Change the size of a device.");
  m.def("set_used_by_others", &simulated::set_used_by_others, py::arg("index"),
        py::arg("bytes"), "Pretend that other processes hold memory of a device.");
  m.def("set_op_seconds", &simulated::set_op_seconds, py::arg("seconds"),
        "Let every operator take that much longer.");
  m.def("fail_next", &simulated::fail_next, py::arg("op"), py::arg("message"),
        py::arg("times") = 1,
        "Let the next calls of an operator ('aten::relu'; '' for any) raise.");
  m.def("counters", &simulated::counters, py::arg("index"),
        "Transfers, operators, synchronizations and memory of a device.");
  m.def("op_calls", &simulated::op_calls, "How often each operator was called.");
  m.def("reset_counters", &simulated::reset_counters, "Set all counts to zero.");
  m.def("device_count", [] { return static_cast<int>(simulated::device_count()); });
  m.def("current_device", &simulated::get_current_device);
  m.def("set_device", &simulated::set_current_device, py::arg("index"));
}
