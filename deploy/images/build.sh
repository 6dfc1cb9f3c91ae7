#!/usr/bin/env bash
# Builds one of Blink's images with buildah, which needs neither a daemon nor Docker:
#   deploy/images/build.sh gateway|engine-cpu|engine-cuda|operator [TAG]
# ARCH=arm64 builds for Arm (the gateway of a DPU), on any machine. BASE names another base image for the build's tools;
# base.sh makes one where no registry is reached. BUILDAH_FLAGS is for hosts without overlayfs (--storage-driver vfs),
# BUILD_FLAGS for networks with an authority of their own:
#   --volume AUTHORITY.pem:/authority.pem:ro --build-arg PIP_CERT=/authority.pem
# An image that is larger than its limit gets no name, and one of that name stays what it was: whoever raises one here says in the commit what the room is for.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${1:?usage: deploy/images/build.sh gateway|engine-cpu|engine-cuda|operator [TAG]}
tag=${2:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
declare -A limits=([gateway]=320 [engine-cpu]=320 [engine-cuda]=1350 [operator]=260) # MB; arm64 takes 3% more than amd64
case $(uname -m) in aarch64 | arm64) own=arm64 ;; *) own=amd64 ;; esac
arch=${ARCH:-$own}
image=localhost/blink/$target:$tag
# shellcheck disable=SC2086
buildah() { command buildah ${BUILDAH_FLAGS:-} "$@"; }
made=$(mktemp)
trap 'rm -f "$made"' EXIT
# All steps run on this machine's processor, also for another: so the platform of the build is always this one's.
# shellcheck disable=SC2086
buildah build ${BUILD_FLAGS:-} --isolation chroot --format docker --layers --build-arg "TARGETARCH=$arch" \
  ${BASE:+--build-arg "BASE=$BASE"} --file deploy/images/Containerfile --target "$target" --iidfile "$made" .
id=$(sed 's/^sha256://' "$made")
if [ "$arch" != "$own" ]; then
  container=$(buildah from --pull-never "$id")
  buildah config --arch "$arch" "$container"
  id=$(buildah commit --quiet --rm --format docker "$container")
fi
deploy/images/tag.sh "$id" "${limits[$target]}" "$image"
