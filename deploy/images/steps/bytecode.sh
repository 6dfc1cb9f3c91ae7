#!/usr/bin/env bash
# bytecode.sh DIRECTORY...: compiles Python below it, as an image's file system can't be written to at run time.
# The same on all processors; never compared with its source again.
exec python3 -m compileall -q --invalidation-mode unchecked-hash "$@"
