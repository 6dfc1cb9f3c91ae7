#!/usr/bin/env bash
# base.sh: makes localhost/blink/base from Debian's mirror, for build.sh's BASE where no registry is reached. Needs root,
# debootstrap and buildah; BUILDAH_FLAGS as for build.sh.
set -euo pipefail
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase bookworm "$root" http://deb.debian.org/debian >/dev/null
cat > "$root/etc/apt/sources.list" <<SOURCES
deb http://deb.debian.org/debian bookworm main
deb http://deb.debian.org/debian bookworm-updates main
deb http://deb.debian.org/debian-security bookworm-security main
SOURCES
rm -rf "$root"/var/cache/apt/archives/*.deb
# shellcheck disable=SC2086
buildah() { command buildah ${BUILDAH_FLAGS:-} "$@"; }
container=$(buildah from scratch)
buildah add --quiet "$container" "$root" / >/dev/null
buildah commit --quiet --rm "$container" localhost/blink/base
