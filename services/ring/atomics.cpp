// Ordered 64-bit access to shared memory, which Python itself does not offer: on Arm a plain store may pass an
// earlier one. Offsets are checked here, so a wrong one is an exception rather than a crash.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace nb = nanobind;

namespace {

using Region = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint64_t* word_at(const Region& region, std::uint64_t offset) {
  if (offset % 8 != 0 || region.size() < 8 || offset > region.size() - 8) {
    throw nb::index_error("offset is not an aligned 64-bit word of the region");
  }
  return reinterpret_cast<std::uint64_t*>(region.data() + offset);
}

}  // namespace

NB_MODULE(_atomics, module) {
  module.def(
      "store_release",
      [](const Region& region, std::uint64_t offset, std::uint64_t value) {
        __atomic_store_n(word_at(region, offset), value, __ATOMIC_RELEASE);
      },
      nb::arg("region"), nb::arg("offset"), nb::arg("value"));
  module.def(
      "load_acquire",
      [](const Region& region, std::uint64_t offset) {
        return __atomic_load_n(word_at(region, offset), __ATOMIC_ACQUIRE);
      },
      nb::arg("region"), nb::arg("offset"));
}
