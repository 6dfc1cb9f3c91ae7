#!/usr/bin/env bash
# Writes steps/debian-amd64.lock and steps/debian-arm64.lock: the Debian 12 packages that images are made of, by path and SHA-256.
# Run it when Debian has updated one of them, as a mirror keeps only the latest.
set -euo pipefail
cd "$(dirname "$0")/steps"
packages="ca-certificates ibverbs-providers libbz2-1.0 libc6 libcrypt1 libexpat1 libffi8 libgcc-s1 libibverbs1 liblzma5
  libncursesw6 libnl-3-200 libnl-route-3-200 libpython3.11 libpython3.11-minimal
  libpython3.11-stdlib librdmacm1 libreadline8 libssl3
  libstdc++6 libtinfo6 libuuid1 python3-minimal python3-pyverbs python3.11-minimal tzdata zlib1g"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for arch in amd64 arm64; do
  mkdir -p "$scratch/$arch/partial"
  of=(-o APT::Architecture=$arch -o APT::Architectures=$arch -o Dir::State::status=/dev/null -o APT::Sandbox::User=
    -o Dir::State::lists="$scratch/$arch" -o Dir::Cache="$scratch" -o Debug::NoLocking=1)
  apt-get -qq "${of[@]}" update
  # shellcheck disable=SC2086
  apt-cache "${of[@]}" show --no-all-versions $packages \
    | awk '/^Filename: /{path = $2} /^SHA256: /{print (path ~ /^pool\/updates/ ? "debian-security/" : "debian/") path, $2}' \
    | sort > debian-$arch.lock
  test "$(wc -l < debian-$arch.lock)" = "$(wc -w <<< "$packages")"
done
