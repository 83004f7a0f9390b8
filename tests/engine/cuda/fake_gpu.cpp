// Lets torch's autograd run on tensors without data that say they are on a GPU, in a build of torch without CUDA: a device
// whose streams and events do nothing. Loaded before torch (LD_PRELOAD); see fake_training.py.

#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

struct OneDevice final : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, here()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, here()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  static Device here() { return Device(DeviceType::CUDA, 0); }
};
C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)

}  // namespace c10::impl

namespace at::accelerator {

// In place of torch's own, which knows at compile time that there is none.
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }

}  // namespace at::accelerator

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
