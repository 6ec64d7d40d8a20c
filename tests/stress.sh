#!/usr/bin/env bash
# Runs the whole suite several times with two busy loops per core beside it: nothing in it may need an idle machine.
#
#   tests/stress.sh                        five times, everything
#   tests/stress.sh 2 -m "not slow"        twice, with further arguments of pytest
#
# Prints for each run as it ends its time, the machine's load, what pytest counted and the tests that failed; all that
# pytest wrote is in out/stress-RUN.log.
set -uo pipefail
cd "$(dirname "$0")/.."

times=${1-5}
shift || true
mkdir -p out
loops=()
trap 'kill "${loops[@]}" 2> /dev/null' EXIT
trap 'exit 130' INT TERM
for _ in $(seq $((2 * $(nproc)))); do
    (while :; do :; done) &
    loops+=($!)
done

failures=0
for ((i = 1; i <= times; i++)); do
    began=$SECONDS report=out/stress-$i.log
    python -m pytest -n 4 --dist worksteal "$@" > "$report" 2>&1 || failures=1
    load=$(cut -d ' ' -f 2 /proc/loadavg)  # of five minutes
    echo "run $i of $times: $((SECONDS - began)) s, load $load, $(tail -n 1 "$report" | tr -d '=' | xargs)"
    grep -E '^(FAILED|ERROR) ' "$report"
done
exit "$failures"
