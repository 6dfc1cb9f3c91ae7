#!/usr/bin/env bash
# Builds one of Blink's images with buildah, which needs neither a daemon nor Docker:
#   deploy/images/build.sh gateway|engine-cpu|engine-cuda|operator [TAG]
# BASE names another base image. BUILDAH_FLAGS is for hosts without overlayfs (--storage-driver vfs), BUILD_FLAGS for networks
# with an authority of their own: --volume /etc/ssl/certs:/etc/ssl/certs:ro --build-arg PIP_CERT=/etc/ssl/certs/ca-certificates.crt
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${1:?usage: deploy/images/build.sh gateway|engine-cpu|engine-cuda|operator [TAG]}
tag=${2:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
# shellcheck disable=SC2086
exec buildah ${BUILDAH_FLAGS:-} build ${BUILD_FLAGS:-} --isolation chroot --format docker --layers \
  --file deploy/images/Containerfile --target "$target" ${BASE:+--build-arg "BASE=$BASE"} --tag "blink/$target:$tag" .
