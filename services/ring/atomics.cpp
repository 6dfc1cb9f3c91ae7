// Ordered access to shared memory, which Python itself does not offer: on Arm a plain store may pass an earlier one,
// and memcpy may tear a word. Offsets are checked here, so a wrong one is an exception rather than a crash.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <cstring>

namespace nb = nanobind;

namespace {

using Region = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::uint64_t kWord = 8;

std::uint8_t* range_at(const Region& region, std::uint64_t offset, std::uint64_t length) {
  if (offset > region.size() || length > region.size() - offset) {
    throw nb::index_error("range leaves the region");
  }
  return region.data() + offset;
}

std::uint64_t* word_at(const Region& region, std::uint64_t offset) {
  if (offset % kWord != 0 || region.size() < kWord || offset > region.size() - kWord) {
    throw nb::index_error("offset is not an aligned 64-bit word of the region");
  }
  return reinterpret_cast<std::uint64_t*>(region.data() + offset);
}

// Bytes before the first aligned word of [shared, shared + length).
std::uint64_t unaligned_head(const std::uint8_t* shared, std::uint64_t length) {
  std::uint64_t head = -reinterpret_cast<std::uintptr_t>(shared) % kWord;
  return head < length ? head : length;
}

void load_words(std::uint8_t* private_copy, const std::uint8_t* shared, std::uint64_t length) {
  std::uint64_t done = unaligned_head(shared, length);
  std::memcpy(private_copy, shared, done);
  for (; done + kWord <= length; done += kWord) {
    std::uint64_t word = __atomic_load_n(reinterpret_cast<const std::uint64_t*>(shared + done), __ATOMIC_RELAXED);
    std::memcpy(private_copy + done, &word, kWord);
  }
  std::memcpy(private_copy + done, shared + done, length - done);
}

void store_words(std::uint8_t* shared, const std::uint8_t* private_copy, std::uint64_t length) {
  std::uint64_t done = unaligned_head(shared, length);
  std::memcpy(shared, private_copy, done);
  for (; done + kWord <= length; done += kWord) {
    std::uint64_t word;
    std::memcpy(&word, private_copy + done, kWord);
    __atomic_store_n(reinterpret_cast<std::uint64_t*>(shared + done), word, __ATOMIC_RELAXED);
  }
  std::memcpy(shared + done, private_copy + done, length - done);
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
  module.def(
      "store",
      [](const Region& region, std::uint64_t offset, const nb::bytes& data) {
        store_words(range_at(region, offset, data.size()), static_cast<const std::uint8_t*>(data.data()), data.size());
      },
      nb::arg("region"), nb::arg("offset"), nb::arg("data"));
  module.def(
      "load",
      [](const Region& region, std::uint64_t offset, std::uint64_t length) {
        const std::uint8_t* shared = range_at(region, offset, length);
        PyObject* copy = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(length));
        if (copy == nullptr) nb::raise_python_error();
        load_words(reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(copy)), shared, length);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return nb::steal<nb::bytes>(copy);
      },
      nb::arg("region"), nb::arg("offset"), nb::arg("length"));
}
