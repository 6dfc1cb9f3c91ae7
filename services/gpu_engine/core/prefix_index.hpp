// Which KV pages hold which tokens after which others: a trie whose nodes are pages. A hash finds a page; what decides
// is that its tokens, its parent page and, for a first page, the salt are the same
// (docs/decisions/0023-prefix-cache.md).
#pragma once

#include "services/gpu_engine/core/context.hpp"

namespace blink::core {

struct CacheSalt {
  u64 words[2];
};

BLINK_FN bool operator==(const CacheSalt& a, const CacheSalt& b) {
  return a.words[0] == b.words[0] && a.words[1] == b.words[1];
}

// One for each KV page; means something while the page is in the index.
struct CachedPage {
  u64 key;  // hash of its tokens and of all before them
  CacheSalt salt;
  u32 parent;      // the page of the tokens before; kNone for a first page
  u32 next;        // in its bucket
  u32 references;  // running requests that have it in their page table
  u32 idle_place;  // in the queue of idle pages (page_pool.hpp); kNone while there are references
};

struct PrefixIndex {
  CachedPage* pages;  // [page_count]
  u32* tokens;        // [page_count, page_size]
  u32* buckets;       // [bucket_count] each one's first page, or kNone
  u32 bucket_count;   // a power of two; 0 when nothing is cached
  u64 seed;           // that nobody outside knows
  u64 key_mask;       // all ones; tests make different tokens have the same key

  // Of the request that was looked at last, for each of its pages.
  u32* found;  // [pages_per_sequence] the page that has its key, or kNone
  u64* chain;  // [pages_per_sequence] what the key is made of: sums over the pages up to here

  // That request if it waits, its arrival plus one; 0 when it no longer does, or the index has changed since.
  u64 looked_for;
  u32 hit;       // how many of its first pages are cached
  u64 searches;  // for waiting requests; tests read it
};

// splitmix64's output function.
BLINK_FN u64 mixed(u64 word) {
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9;
  word = (word ^ word >> 27) * 0x94D049BB133111EB;
  return word ^ word >> 31;
}

BLINK_FN u64 root_chain(const PrefixIndex& index, const CacheSalt& salt) {
  return mixed(salt.words[0] ^ mixed(salt.words[1] ^ index.seed));
}

// What the page at `place` of a sequence adds to the chain. A sum can be made by all threads at once, and the place
// in each summand keeps the order of pages in it.
BLINK_FN u64 page_link(const PrefixIndex& index, const u32* tokens, u32 page_size, u32 place) {
  u64 link = index.seed + place;
  for (u32 i = 0; i < page_size; ++i) {
    link = (link ^ tokens[i]) * 0x9E3779B97F4A7C15;
    link ^= link >> 32;
  }
  return mixed(link);
}

BLINK_FN u64 key_of(const PrefixIndex& index, u64 chain) { return mixed(chain) & index.key_mask; }

BLINK_FN u32* bucket_of(const PrefixIndex& index, u64 key) {
  return index.buckets + (static_cast<u32>(key) & (index.bucket_count - 1));
}

// The page of that key, or kNone.
BLINK_FN u32 find_page(const PrefixIndex& index, u64 key) {
  u32 page = *bucket_of(index, key);
  while (page != kNone && index.pages[page].key != key) page = index.pages[page].next;
  return page;
}

// f(page) for each page(i), i < n; those of one bucket on one thread, in order.
template <class Context, class Page, class F>
BLINK_FN void by_bucket(Context& context, const PrefixIndex& index, u32 n, Page page, F f) {
  const u32 mask = index.bucket_count - 1;
  by_key(
      context, n, [&](u32 i) { return static_cast<u32>(index.pages[page(i)].key) & mask; }, [&](u32 i) { f(page(i)); });
}

template <class Context, class Page>
BLINK_RARE_FN void link_pages(Context& context, const PrefixIndex& index, u32 n, Page page) {
  by_bucket(context, index, n, page, [&](u32 linked) {
    u32* bucket = bucket_of(index, index.pages[linked].key);
    index.pages[linked].next = *bucket;
    *bucket = linked;
  });
}

template <class Context, class Page>
BLINK_RARE_FN void unlink_pages(Context& context, const PrefixIndex& index, u32 n, Page page) {
  by_bucket(context, index, n, page, [&](u32 unlinked) {
    u32* link = bucket_of(index, index.pages[unlinked].key);
    while (*link != unlinked) link = &index.pages[*link].next;
    *link = index.pages[unlinked].next;
  });
}

}  // namespace blink::core
