#!/usr/bin/env bash
# Compiles Blink's wheel for $TARGETARCH and installs it into /site, inside an image's build.
set -euo pipefail
case ${TARGETARCH:?} in amd64) machine=x86_64 ;; arm64) machine=aarch64 ;; esac
export CXX=$machine-linux-gnu-g++ PATH=/tools/bin:$PATH
# As scikit-build-core wants to be told of another processor.
export SETUPTOOLS_EXT_SUFFIX=.cpython-311-$machine-linux-gnu.so _PYTHON_HOST_PLATFORM=linux-$machine
export CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$machine"
pip wheel --quiet --no-build-isolation --no-deps --wheel-dir /wheels .
python3 -m zipfile --extract /wheels/blink-*.whl /site
test -e "/site/services/ring/_atomics$SETUPTOOLS_EXT_SUFFIX"
bash bytecode.sh /site/services /site/blink
