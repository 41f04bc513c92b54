#!/bin/bash
# Runs all that needs GPUs, one command after another, and copies what they print to a file for a
# report. A command that fails doesn't end it; the file's last lines say how each one ended.
# `make test-gpu` calls it: tests/gpu/report.sh RANKS FOLDER_OF_PROGRAMS [FILE]
ranks=$1
programs=$2
file=${3:-result/gpu-report.txt}
seconds=1800 # of one command, in which a rank may hang
has_failed=0
ends=

try() {
    printf '\n=== %s\n' "$*" | tee -a "$file"
    timeout --kill-after=10 $seconds "$@" 2>&1 | tee -a "$file"
    local status=${PIPESTATUS[0]}
    ends+="status $status: $*"$'\n'
    # With 3 the doctor warns: it works, though slower or less safely than it could.
    if [ "$status" != 0 ] && ! [[ $status = 3 && "$*" = *chainermn_tools\ doctor* ]]; then
        has_failed=1
    fi
}

mkdir -p "$(dirname "$file")"
: >"$file"
pytest="$programs/python -m pytest -p no:cacheprovider -rfE --full"
try "$programs/python" -m chainermn_tools env
try "$programs/python" -m chainermn_tools doctor -n "$ranks" --timeout 600
try $pytest tests/gpu
for each in $(printf '%s\n' 1 2 "$ranks" | sort -nu); do
    try "$programs/mpiexec" -n "$each" $pytest --world -m gpu tests/gpu
done
try "$programs/mpiexec" -n "$ranks" "$programs/python" benchmarks/gpu.py
printf '\n=== how each ended; 124 is one that took more than %s s\n%s' $seconds "$ends" | tee -a "$file"
echo "to be attached to a report: $file"
exit $has_failed
