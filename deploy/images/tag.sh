#!/usr/bin/env bash
# tag.sh ID LIMIT NAME: names an image, or fails where its layers together are larger than LIMIT, in MB. BUILDAH_FLAGS as for build.sh.
set -euo pipefail
id=$1 limit=$2 name=$3
# shellcheck disable=SC2086
buildah() { command buildah ${BUILDAH_FLAGS:-} "$@"; }
manifest=$(buildah inspect --type image --format '{{.Manifest}}' "$id")
size=$(grep -o '"size":[0-9]*' <<< "$manifest" | awk -F: '{sum += $2} END {print int((sum + 999999) / 1000000)}')
test "$size" -gt 0 && test "$size" -le "$limit" || { echo "$name has $size MB, its limit is $limit MB (build.sh): not tagged" >&2; exit 1; }
buildah tag "$id" "$name"
echo "$name: $size MB of $limit MB"
