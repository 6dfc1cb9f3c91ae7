// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), and how sampling uses it:
// the key is the request's seed, the counter (token id / 4, position, 0, 0), and a token's word is id % 4.
#pragma once

#include <cstdint>

namespace blink::cpu {

struct PhiloxBlock {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

static inline PhiloxBlock philox(uint64_t key, PhiloxBlock counter) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxMultiplier0) * counter.word[0];
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxMultiplier1) * counter.word[2];
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ counter.word[1] ^ k0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ counter.word[3] ^ k1, static_cast<uint32_t>(p0)}};
  }
  return counter;
}

}  // namespace blink::cpu
