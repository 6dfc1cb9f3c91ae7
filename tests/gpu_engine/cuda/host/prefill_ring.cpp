// The rings of prefill tiles on the host: what consumers find in each block of operands, against the pages. Exits with
// 1, saying what is wrong.
#include <cstdio>
#include <numeric>
#include <random>

#include "device.hpp"

// Kernels, which need what is above.
#include "attention_ring.cuh"

using namespace blink;

namespace {

constexpr u32 kPages = 700 * 16 / kPageSize, kTokens = 300, kLines = 3;
constexpr u32 kThreads = (1 + kConsumers) * kWarpgroup;

std::mt19937 generator(11);

u16 operand_of(bf16 stored) { return stored.bits; }
u16 operand_of(e4m3 stored) { return half_of_e4m3(stored.code); }

struct Bench {
  std::vector<KvElement> pages = std::vector<KvElement>(kPages * kPageStride);
  std::vector<u16> queries = std::vector<u16>(kTokens * kQkvWidth);
  std::vector<i32> table;
  std::vector<WorkItem> tiles;
  u32 pages_per_sequence = kPages / kLines;

  explicit Bench(const std::vector<WorkItem>& items) : table(kPages), tiles(items) {
    auto* bytes = reinterpret_cast<unsigned char*>(pages.data());
    for (u64 i = 0; i < pages.size() * sizeof(KvElement); ++i) bytes[i] = static_cast<unsigned char>(generator());
    for (u16& query : queries) query = static_cast<u16>(generator());
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), generator);
  }

  u64 wrong = 0;

  void check_block(const Tile& tile, u32 block, bool values, const Operand* found) {
    const u32 last_page = (tile.item.kv_length - 1) / kPageSize;
    for (u32 key = 0; key < kBlockKeys; ++key) {
      const u32 number = min((block * kBlockKeys + key) / kPageSize, last_page);
      const u32 page = table[tile.item.line * pages_per_sequence + number];
      const KvElement* stored = pages.data() + page_offset(page, tile.kv_head) + (values ? kPageValues : 0);
      for (u32 d = 0; d < kHeadDim; ++d) {
        const u32 row = key / 8 * kHalves * kAtom + d / kColumns * kAtom + key % 8 * kColumns;
        const u16 expected = operand_of(stored[key % kPageSize * kHeadDim + d]);
        wrong += found[row + (d % kColumns ^ key % 8 * 8)].bits != expected;
      }
    }
  }

  void check_queries(const Tile& tile, const Operand (&found)[kHalves][kTileRows * kColumns]) {
    for (u32 row = 0; row < kTileTokens * kGroup; ++row) {
      const u32 token = tile.item.token + tile.item.first + row / kGroup;
      if (token >= kTokens) continue;
      const u32 head = tile.kv_head * kGroup + row % kGroup;
      for (u32 d = 0; d < kHeadDim; ++d) {
        const u32 at = row * kColumns + (d % kColumns ^ row % 8 * 8);
        wrong += found[d / kColumns][at].bits != queries[token * kQkvWidth + head * kHeadDim + d];
      }
    }
  }

  // As consume_tiles takes them; the first thread looks at everything.
  void consume(PrefillShared& shared) {
    const bool looks = threadIdx.x == kWarpgroup;
    const auto release = [&](CopyBarrier& empty) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) empty.arrive();
    };
    for (Place queries = {0}, block = {0};; ++queries.turn) {
      shared.queries_full[queries.slot()].wait(queries.parity());
      const Tile tile = shared.tile[queries.slot()];
      if (tile.end == 0) return;
      if (looks) check_queries(tile, shared.queries[queries.slot()]);
      for (u32 i = tile.begin; i <= tile.end; ++i) {
        if (i < tile.end) {
          shared.keys_full[block.slot()].wait(block.parity());
          if (looks) check_block(tile, i, false, shared.keys[block.slot()]);
          release(shared.keys_empty[block.slot()]);
        }
        if (i > tile.begin) {
          const Place before = {block.turn - 1};
          shared.values_full[before.slot()].wait(before.parity());
          if (looks) check_block(tile, i - 1, true, shared.values[before.slot()]);
          release(shared.values_empty[before.slot()]);
        }
        if (i < tile.end) ++block.turn;
      }
      release(shared.queries_empty[queries.slot()]);
    }
  }

  void run() {
    PrefillShared& shared = *reinterpret_cast<PrefillShared*>(dynamic_memory);
    u32 ticket = 0, items = static_cast<u32>(tiles.size()) * kKvHeads;
    Step step = {};
    step.page_table = table.data(), step.pages_per_sequence = pages_per_sequence;
    WorkList work = {};
    work.tiles = tiles.data(), work.segment_blocks = 3;
    // As attention_maps.py makes them.
    const u64 row = max(kKeyBytes, 128u), atoms = kPageHead * sizeof(KvElement) / (8 * row);
    const TensorMap page_map = map_of(pages.data(), {64, 8, row / 128, kPages * 2 * kKvHeads * atoms},
                                      {row, 128, 8 * row}, {64, 8, row / 128, atoms});
    const TensorMap query_map = map_of(queries.data(), {kHeadDim, kHeads, kTokens}, {2 * kHeadDim, 2 * kQkvWidth},
                                       {kColumns, kGroup, kTileTokens});
    launch({1, 1, 1}, kThreads, [&] {
      if (threadIdx.x == 0) shared.init();
      __syncthreads();
      if (threadIdx.x < 32) {
        produce_tiles(shared, step, work, 0, 1, items, &ticket, query_map, page_map);
      } else if (threadIdx.x < kWarpgroup) {
        widen_blocks(shared);
      } else {
        consume(shared);
      }
    });
    std::printf("%u items, %llu wrong\n", items, static_cast<unsigned long long>(wrong));
    if (wrong > 0 || ticket != items) std::exit(1);
  }
};

}  // namespace

int main() {
  const auto item = [](u32 line, u32 token, u32 tokens, u32 length, u32 first) {
    return WorkItem{line, line, token, tokens, length, first, kWhole, 0};
  };
  std::vector<WorkItem> items = {item(0, 0, 100, 1100, 64), item(1, 100, 2, 2, 0), item(2, 102, 60, 60, 32)};
  items.push_back({1, 1, 102, 40, 900, 32, 5, 1});  // the second segment alone
  for (const bool late : {false, true}) {
    late_boxes = late;
    Bench(items).run();
  }
}
