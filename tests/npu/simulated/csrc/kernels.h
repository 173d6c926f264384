// Operators: a few of its own, and the CPU's for all the rest.
#pragma once

#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <optional>
#include <thread>
#include <unordered_set>

namespace simulated {

// Counts a call, raises a fault that was ordered for it, and takes its time.
inline void enter_operator(const std::string& name, std::optional<c10::Device> device) {
  {
    auto lock = locked();
    ++state().operator_calls[name];
    if (device) ++state().devices[device->index()].operators;
    auto& fault = state().fault;
    if (fault.remaining > 0 && (fault.op.empty() || fault.op == name)) {
      --fault.remaining;
      TORCH_CHECK(false, fault.message);
    }
  }
  if (const auto microseconds = state().operator_microseconds.load()) {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  }
}

class InKernel {
 public:
  InKernel() { ++kernel_depth; }
  ~InKernel() { --kernel_depth; }
};

// The same bytes as a CPU tensor; the caller keeps `tensor` alive.
inline at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto view = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(),
      tensor.options().device(at::kCPU));
  return tensor.is_conj() ? view.conj() : view;
}

inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device,
    std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on_device(c10::device_or_default(device));
  return at::Tensor(at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format));
}

inline at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on_device(c10::device_or_default(device));
  return at::Tensor(at::detail::empty_strided_generic(
      size, stride, device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype)));
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  if (kernel_depth == 0) {
    auto lock = locked();
    auto& devices = state().devices;
    const auto bytes = static_cast<int64_t>(target.nbytes());
    if (source.is_cpu()) {
      devices[target.device().index()].to_device.add(bytes);
    } else if (target.is_cpu()) {
      devices[source.device().index()].to_host.add(bytes);
    } else {
      devices[source.device().index()].within_device.add(bytes);
    }
  }
  return target;
}

inline at::Tensor copy_from_and_resize(
    const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

inline at::Scalar local_scalar(const at::Tensor& tensor) {
  if (kernel_depth == 0) {
    auto lock = locked();
    state().devices[tensor.device().index()].to_host.add(tensor.element_size());
  }
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

inline const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef size,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on_device(self.device());
  return at::native::resize_(self, size, format);
}

inline at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, storage, 0, {elements}, {});
}

inline at::Tensor& set_storage_view(
    at::Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline void record_stream(at::Tensor&, at::Stream) {}

[[noreturn]] inline void refuse_two_devices(
    c10::Device first, c10::Device second, const std::string& name) {
  TORCH_CHECK(
      false, "Expected all tensors to be on the same device, but found at least two "
      "devices, ", first, " and ", second, "! (when checking arguments of ", name, ")");
  std::abort();
}

// The one device an operator's arguments are on; CPU scalars may join any.
class CommonDevice {
 public:
  explicit CommonDevice(const std::string& name) : name_(name) {}

  void see(const at::Tensor& tensor) {
    static const std::unordered_set<std::string> mixing = {
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
        "aten::_foreach_copy_"};
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    if (!device_) {
      device_ = tensor.device();
    } else if (*device_ != tensor.device() && mixing.count(name_) == 0) {
      refuse_two_devices(*device_, tensor.device(), name_);
    }
  }

  void see(const c10::IValue& value) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) see(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor) see(*tensor);
      }
    }
  }

  std::optional<c10::Device> npu() const {
    return device_ && device_->is_privateuseone() ? device_ : std::nullopt;
  }

 private:
  const std::string& name_;
  std::optional<c10::Device> device_;
};

inline void compute_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  CommonDevice common(schema.name());
  for (const auto& value : torch::jit::last(*stack, schema.arguments().size())) {
    common.see(value);
  }
  enter_operator(schema.name(), common.npu());
  InKernel in_kernel;
  c10::OptionalDeviceGuard on_device(common.npu());
  at::native::cpu_fallback(op, stack);
}

// The CPU fallback cannot serve this one: torch asks the device for it by name.
inline at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight,
    const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups) {
  const std::string name = "aten::convolution";
  CommonDevice common(name);
  common.see(input);
  common.see(weight);
  if (bias) common.see(*bias);
  enter_operator(name, input.device());
  InKernel in_kernel;
  c10::DeviceGuard on_device(input.device());
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = on_host(*bias);
  return at::convolution(
             on_host(input), on_host(weight), host_bias, stride, padding, dilation,
             transposed, output_padding, groups)
      .to(input.device());
}

}  // namespace simulated

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using View = at::Tensor (*)(const at::Tensor&, at::IntArrayRef);
  m.impl("empty.memory_format", &simulated::empty);
  m.impl("empty_strided", &simulated::empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<View>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &simulated::resize);
  m.impl("_copy_from", &simulated::copy_from);
  m.impl("_copy_from_and_resize", &simulated::copy_from_and_resize);
  m.impl("_local_scalar_dense", &simulated::local_scalar);
  m.impl("set_.source_Tensor", &simulated::set_tensor);
  m.impl("set_.source_Storage", &simulated::set_storage);
  m.impl("set_.source_Storage_storage_offset", &simulated::set_storage_view);
  m.impl("record_stream", &simulated::record_stream);
  m.impl("convolution_overrideable", &simulated::convolution);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::compute_on_cpu>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
}
}  // namespace at::autocast
