#!/bin/bash
# A hook for pre-commit: fails a commit whose configurations would not fit their GPU any more.
#
#   fits_each.sh GPU FILE...
#
# Ends with 1 where a file does not fit, or cannot be read; runs that are too close to call, or of which
# memest cannot say (3, 7), pass with their sentence.
set -u
gpu="${1:?a GPU of memest gpus}"
shift
failed=0
for file in "$@"; do
    printf '%s: ' "$file"
    memest fits "$file" --gpu "$gpu"
    case $? in
        0 | 3 | 7) ;;
        *) failed=1 ;;
    esac
done
exit "$failed"
