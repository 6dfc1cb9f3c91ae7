#!/usr/bin/env bash
# wheels.sh FILE: installs what FILE locks for $TARGETARCH into /site, inside an image's build.
set -euo pipefail
case ${TARGETARCH:?} in amd64) machine=x86_64 ;; arm64) machine=aarch64 ;; esac
for glibc in 2014 _2_17 _2_26 _2_27 _2_28 _2_31 _2_34 _2_35; do platforms+=(--platform "manylinux${glibc}_$machine"); done
/tools/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --no-compile --upgrade --target /site \
  "${platforms[@]}" --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none --only-binary :all: \
  --require-hashes --no-deps -r "$1"
rm -rf /site/bin
# Nobody runs these here.
find /site/numpy -type d -name tests -prune -exec rm -r {} + 2>/dev/null || true
bash bytecode.sh /site
