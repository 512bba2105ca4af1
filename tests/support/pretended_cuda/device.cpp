// A pretended CUDA device: tensors whose device is cuda:0 or cuda:1 and whose memory is the CPU's.
//
// It registers what PyTorch asks of a device (guard, streams, events, hooks) and the choice of scaled dot product
// attention. It has no kernels: the dispatch mode of mode.py runs every operator on the CPU.

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

namespace {

constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex chosen_device = 0;
int capability_major = 9;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }
  static c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return device(chosen_device); }
  void setDevice(c10::Device device) const override { chosen_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { chosen_device = device.index(); }
  c10::Device exchangeDevice(c10::Device next) const override {
    const auto previous = getDevice();
    chosen_device = next.index();
    return previous;
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(next.device()); }
  // All work is done when a call returns, so that every event has happened.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// A tensor with the sizes and strides of another, over a storage.
at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

// The memory of a tensor under another device. It lives as long as either.
c10::Storage shared(const at::Tensor& tensor, c10::Device device) {
  auto* owner = new c10::Storage(tensor.storage());
  c10::DataPtr memory(const_cast<void*>(owner->data()), owner, [](void* held) { delete static_cast<c10::Storage*>(held); },
                      device);
  return {c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(memory), nullptr, false};
}

at::Tensor to_device(const at::Tensor& tensor, int64_t index) {
  return over(shared(tensor, Guard::device(static_cast<c10::DeviceIndex>(index))), c10::DispatchKey::CUDA, tensor);
}

at::Tensor to_cpu(const at::Tensor& tensor) {
  return over(shared(tensor, c10::Device(c10::DeviceType::CPU)), c10::DispatchKey::CPU, tensor);
}

at::Tensor view_of(const at::Tensor& like, const at::Tensor& base) {
  return over(base.storage(), c10::DispatchKey::CUDA, like);
}

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// The rules that PyTorch compiles for CUDA alone: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch 2.13,
// for compute capability 8.0 and 9.0, CUDA 12.8 or later and cuDNN 9.16. The others are in the header of every build.

bool takes_cudnn(const sdp::sdp_params& call) {
  const auto& query = call.query;
  const auto dim = query.size(-1), value_dim = call.value.size(-1);
  const auto& context = at::globalContext();
  return context.userEnabledCuDNNSDP() && !context.deterministicAlgorithms() && is_half(query) &&
         sdp::check_attn_mask_shape(call, false) && sdp::check_last_dim_stride_equals_1_dense<true>(call, false) &&
         sdp::check_batch_size_and_num_heads_dense<true, false>(call, false) && dim <= 128 && value_dim <= 128 &&
         dim % 8 == 0 && value_dim % 8 == 0 && call.key.size(2) != 1 && !(call.dropout > 0 && query.size(2) == 1) &&
         call.dropout * 16 == static_cast<int64_t>(call.dropout * 16);
}

bool takes_flash(const sdp::sdp_params& call) {
  const auto dim = call.query.size(-1);
  return at::globalContext().userEnabledFlashSDP() && is_half(call.query) && sdp::check_for_attn_mask(call, false) &&
         dim == call.value.size(-1) && dim <= 256 && !(call.is_causal && call.query.size(2) != call.key.size(2)) &&
         sdp::check_batch_size_and_num_heads_dense<true>(call, false) &&
         sdp::check_last_dim_stride_equals_1_dense<true>(call, false);
}

bool takes_efficient(const sdp::sdp_params& call) {
  const int64_t alignment = is_half(call.query) ? 8 : 4;
  const auto aligned = [&](const at::Tensor& tensor) {
    return tensor.size(-1) > 0 && tensor.size(-1) % alignment == 0 && tensor.storage_offset() % alignment == 0;
  };
  return at::globalContext().userEnabledMemEfficientSDP() && (is_half(call.query) || call.query.scalar_type() == at::kFloat) &&
         aligned(call.query) && aligned(call.key) && aligned(call.value) &&
         sdp::check_last_dim_stride_equals_1_dense<false>(call, false) &&
         sdp::check_batch_size_and_num_heads_dense<false>(call, false);  // no grouped heads
}

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> /*scale*/,
               bool grouped) {
  const sdp::sdp_params call{query, key, value, mask, dropout, is_causal, grouped};
  if (!sdp::check_tensor_shapes(call, false) || !sdp::check_nonzero_sequence_lengths_dense(call, false)) {
    return static_cast<int64_t>(at::SDPBackend::math);
  }
  // cuDNN comes first on Hopper alone; elsewhere it stands behind the path that builds the scores.
  if (capability_major == 9 && takes_cudnn(call)) return static_cast<int64_t>(at::SDPBackend::cudnn_attention);
  if (takes_flash(call)) return static_cast<int64_t>(at::SDPBackend::flash_attention);
  if (takes_efficient(call)) return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  return static_cast<int64_t>(at::SDPBackend::math);
}

Guard guard;

void connect(int major) {
  capability_major = major;
  static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
}

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return chosen_device; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

PYBIND11_MODULE(pretended_cuda_device, module) {
  module.def("connect", &connect);
  module.def("to_device", &to_device);
  module.def("to_cpu", &to_cpu);
  module.def("view_of", &view_of);
  module.def("choose", &choose);
}
