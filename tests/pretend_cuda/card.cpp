// What makes a CPU build of torch believe in one CUDA device: it has to be there before torch is
// loaded (LD_PRELOAD). The device itself is card.py; nothing here computes or waits.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace {

const c10::Device card(c10::DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
    c10::Device exchangeDevice(c10::Device) const override { return card; }
    c10::Device getDevice() const override { return card; }
    c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
    c10::Stream getNewStream(c10::Device, int = 0) const override { return stream(); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
    void record(
        void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void*) const override {}

   private:
    static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, card); }
};

// Autograd asks these which devices there are.
struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
    int getNumGPUs() const override { return 1; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

// DDP measures its communication with one.
struct NoTimer final : c10d::Timer {
    explicit NoTimer(c10::Device) {}
    std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)
}
