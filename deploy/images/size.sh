#!/usr/bin/env bash
# size.sh IMAGE LIMIT: fails where the layers of an image together are larger than LIMIT, in MB. BUILDAH_FLAGS as for build.sh.
set -euo pipefail
image=$1 limit=$2
# shellcheck disable=SC2086
manifest=$(buildah ${BUILDAH_FLAGS:-} inspect --type image --format '{{.Manifest}}' "$image")
size=$(grep -o '"size":[0-9]*' <<< "$manifest" | awk -F: '{sum += $2} END {print int((sum + 999999) / 1000000)}')
test "$size" -gt 0 && test "$size" -le "$limit" || { echo "$image has $size MB, its limit is $limit MB (build.sh)" >&2; exit 1; }
echo "$image: $size MB of $limit MB"
