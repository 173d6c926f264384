// What the simulated devices are made of: sizes, counters and faults to come.
//
// One State exists per process. Every member is guarded by its mutex, except what is
// atomic. The current device and stream belong to a thread, as on the real device.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace simulated {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

struct Transfers {
  int64_t count = 0;
  int64_t bytes = 0;

  void add(int64_t transferred) {
    ++count;
    bytes += transferred;
  }
};

struct DeviceState {
  size_t total_bytes = 0;
  size_t bytes_used_by_others = 0;
  c10::CachingAllocator::Stat allocated;
  c10::CachingAllocator::Stat reserved;
  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t out_of_memory = 0;
  Transfers to_device, to_host, within_device;
  int64_t operators = 0;
  int64_t synchronizations = 0;
};

// The next `remaining` calls of `op` (of any operator if empty) raise `message`.
struct Fault {
  std::string op;
  std::string message;
  int remaining = 0;
};

struct State {
  std::mutex mutex;
  std::vector<DeviceState> devices;
  std::map<std::string, int64_t> operator_calls;
  Fault fault;
  std::atomic<int64_t> operator_microseconds{0};
};

// Never destroyed: tensors may outlive everything else at exit.
inline State& state() {
  static State* instance = new State();
  return *instance;
}

inline std::lock_guard<std::mutex> locked() {
  return std::lock_guard<std::mutex>(state().mutex);
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::unordered_map<c10::DeviceIndex, c10::StreamId> current_streams;

// Positive while a CPU kernel computes for a device: its copies are no transfers.
inline thread_local int kernel_depth = 0;

inline c10::DeviceIndex device_count() {
  return static_cast<c10::DeviceIndex>(state().devices.size());
}

inline c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

inline void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count(),
      "SetDevice: device id ", static_cast<int>(index), " is not one of ",
      static_cast<int>(device_count()), ". NPU error, error code is 107001\n",
      "[ERROR] ERR00100 PTA call acl api failed");
}

}  // namespace simulated
