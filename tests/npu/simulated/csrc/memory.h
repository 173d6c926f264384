// Device memory, which is host memory with an account per device, and pinned memory.
#pragma once

#include "state.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace simulated {

constexpr size_t kAlignment = 512;
// The first bytes of each allocation get this value, so that uninitialised reads show.
constexpr int kPoison = 0xFB;
constexpr size_t kPoisonedBytes = 4096;

inline std::string readable(size_t bytes) {
  constexpr double mebi = 1 << 20, gibi = 1 << 30;
  char text[32];
  if (bytes >= (size_t{1} << 30)) {
    std::snprintf(text, sizeof text, "%.2f GiB", bytes / gibi);
  } else {
    std::snprintf(text, sizeof text, "%.2f MiB", bytes / mebi);
  }
  return text;
}

struct Block {
  void* address;
  size_t bytes;
  c10::DeviceIndex device;
};

inline void free_block(void* context) {
  if (context == nullptr) return;
  auto* block = static_cast<Block*>(context);
  {
    auto lock = locked();
    auto& device = state().devices[block->device];
    device.allocated.decrease(block->bytes);
    ++device.frees;
  }
  std::free(block->address);
  delete block;
}

// Keeps no freed block, but remembers how many bytes a caching allocator would hold.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    const auto index = current_device;
    const c10::Device device(kNpu, index);
    if (requested == 0) return {nullptr, nullptr, &free_block, device};
    const size_t bytes = (requested + kAlignment - 1) / kAlignment * kAlignment;
    charge(index, bytes);
    void* address = nullptr;
    TORCH_CHECK(
        posix_memalign(&address, kAlignment, bytes) == 0, "the host is out of memory");
    std::memset(address, kPoison, std::min(bytes, kPoisonedBytes));
    return {address, new Block{address, bytes, index}, &free_block, device};
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    auto lock = locked();
    for (auto& device : state().devices) {
      const auto unused = device.reserved.current - device.allocated.current;
      if (unused > 0) device.reserved.decrease(unused);
    }
  }

  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex index) override {
    check_index(index);
    auto lock = locked();
    const auto& device = state().devices[index];
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = device.allocated;
    stats.active_bytes[0] = device.allocated;
    stats.requested_bytes[0] = device.allocated;
    stats.reserved_bytes[0] = device.reserved;
    stats.allocation[0].current = device.allocations - device.frees;
    stats.allocation[0].allocated = device.allocations;
    stats.allocation[0].freed = device.frees;
    stats.num_ooms = device.out_of_memory;
    stats.num_device_alloc = device.allocations;
    stats.num_device_free = device.frees;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex index) override {
    check_index(index);
    auto lock = locked();
    state().devices[index].allocated.reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex index) override {
    check_index(index);
    auto lock = locked();
    state().devices[index].allocated.reset_peak();
    state().devices[index].reserved.reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    check_index(index);
    auto lock = locked();
    const auto& device = state().devices[index];
    const size_t used = device.reserved.current + device.bytes_used_by_others;
    return {device.total_bytes - std::min(used, device.total_bytes), device.total_bytes};
  }

 private:
  static void charge(c10::DeviceIndex index, size_t bytes) {
    auto lock = locked();
    auto& device = state().devices[index];
    const size_t used = device.allocated.current;
    const size_t taken = used + device.bytes_used_by_others;
    if (taken + bytes > device.total_bytes) {
      ++device.out_of_memory;
      // The wording of torch_npu: callers read it.
      TORCH_CHECK_WITH(
          OutOfMemoryError, false,
          "NPU out of memory. Tried to allocate ", readable(bytes), " (NPU ",
          static_cast<int>(index), "; ", readable(device.total_bytes),
          " total capacity; ", readable(used), " already allocated; ", readable(used),
          " current active; ",
          readable(device.total_bytes - std::min(taken, device.total_bytes)), " free; ",
          readable(device.reserved.current), " reserved in total by PyTorch) If reserved "
          "memory is >> allocated memory try setting max_split_size_mb to avoid "
          "fragmentation.");
    }
    device.allocated.increase(bytes);
    ++device.allocations;
    const auto grown = device.allocated.current - device.reserved.current;
    if (grown > 0) device.reserved.increase(grown);
  }
};

inline DeviceAllocator* device_allocator() {
  static auto* instance = new DeviceAllocator();
  return instance;
}

// Pinned memory is plain memory whose ranges are remembered.
class PinnedRanges {
 public:
  void add(const void* address, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_[reinterpret_cast<uintptr_t>(address)] = bytes;
  }

  void remove(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    ranges_.erase(reinterpret_cast<uintptr_t>(address));
  }

  bool contain(const void* address) {
    const auto wanted = reinterpret_cast<uintptr_t>(address);
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = ranges_.upper_bound(wanted);
    if (next == ranges_.begin()) return false;
    const auto& [start, bytes] = *--next;
    return wanted < start + bytes;
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, size_t> ranges_;
};

inline PinnedRanges& pinned_ranges() {
  static auto* instance = new PinnedRanges();
  return *instance;
}

inline void free_pinned(void* address) {
  if (address == nullptr) return;
  pinned_ranges().remove(address);
  std::free(address);
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, at::kCPU};
    void* address = nullptr;
    TORCH_CHECK(
        posix_memalign(&address, kAlignment, bytes) == 0, "Malloc pin memory failed");
    pinned_ranges().add(address, bytes);
    return {address, address, &free_pinned, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

inline PinnedAllocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return instance;
}

}  // namespace simulated
