#!/usr/bin/env bash
# Runs the tests with every Python that this machine has (pyenv's, uv's, the system's and those on the PATH), each
# in an environment of its own, and with the oldest and the newest torch on one of them; prints one table at the end.
#
#   tests/matrix.sh                                      the fast part of the suite, everywhere
#   tests/matrix.sh --wheels                             each wheel alone, each pair and all of them, everywhere,
#                                                        with nothing but what they require; the README of each
#   MATRIX_ARGS="tests/tp_core -x" tests/matrix.sh       arguments for pytest
#   MATRIX_PYTHONS="3.12 3.13" tests/matrix.sh           these alone
#   MATRIX_ALSO="" tests/matrix.sh                       without the other versions of torch, builds of gigabytes
#   MATRIX_DIR=folder tests/matrix.sh                    environments are made there, kept, and used again
set -uo pipefail
cd "$(dirname "$0")/.."

pythons=${MATRIX_PYTHONS-"3.11 3.12 3.13 3.14"}
torch=${MATRIX_TORCH-2.13.0}
also=${MATRIX_ALSO-"3.12=2.11.0 3.12=2.15.0"}  # a Python and the torch to try on it, the oldest and the newest
read -ra arguments <<< "${MATRIX_ARGS-}"
case "${1-}" in
    "") kind="" ;;
    --wheels) kind=-wheels ;;
    *) echo "tests/matrix.sh takes --wheels or nothing, got $1" >&2; exit 2 ;;
esac
# Constraints of the caller's environment (`hatch run matrix` has them) or of the machine name another torch.
export PIP_CONSTRAINT=/dev/null
folder=${MATRIX_DIR-$(mktemp -d)}
mkdir -p "$folder"
[ -n "${MATRIX_DIR-}" ] || trap 'rm -rf "$folder"' EXIT

# Every interpreter of a minor version, by the file that it is: shims and links are the same one.
interpreters() {
    local found
    for found in "$HOME"/.pyenv/versions/"$1".*/bin/python "$HOME"/.local/share/uv/python/*-"$1".*/bin/python \
        /usr/bin/python"$1" /usr/local/bin/python"$1" "$(command -v "python$1")"; do
        [ -x "$found" ] || continue
        "$found" -c 'import sys; print(sys._base_executable if sys.prefix != sys.base_prefix else sys.executable)' \
            2> /dev/null | xargs -r realpath
    done | sort -u
}

rows=() missing=() failures=0
# try INTERPRETER TORCH
try() {
    local version env log result
    version=$("$1" -c 'import platform; print(platform.python_version())')
    env=$folder/$version-$(cksum <<< "$1" | cut -d' ' -f1)-torch-$2$kind
    log=$env.log
    echo "== Python $version ($1), torch $2 -> $log"
    if prepare "$1" "$2" "$env" > "$log" 2>&1; then
        run "$env" 2>&1 | tee -a "$log" | grep --line-buffered -E '^(FAILED|ERROR) ' || true
        # The last line that counts tests: a process that outlives pytest may write after it.
        result=$(grep -E '(passed|failed|errors?|no tests ran)\b.* in [0-9.]+s' "$log" | tail -n 1)
        result=$(tr -d '=' <<< "${result:-$(tail -n 1 "$log")}" | xargs)
        grep -qE '[0-9]+ passed' <<< "$result" && ! grep -qE 'failed|error' <<< "$result" || failures=1
    else
        result="no environment: $(grep -E '^ERROR' "$log" | tail -n 1)"
        failures=1
    fi
    rows+=("$version|$1|$2|$result")
    [ -n "${MATRIX_DIR-}" ] || rm -rf "$env"
}

# run ENVIRONMENT
run() {
    if [ -n "$kind" ]; then
        env -u PYTHONPATH "$1/bin/python" -m tests.wheels "$folder/wheels"
    else
        env -u PYTHONPATH PATH="$1/bin:$PATH" "$1/bin/python" -m pytest -m "not slow" "${arguments[@]}"
    fi
}

# prepare INTERPRETER TORCH ENVIRONMENT
prepare() {
    # pip of this script's Python: a system's Python may have none.
    local groups pip=(python -m pip --python "$3/bin/python" --disable-pip-version-check)
    [ -x "$3/bin/python" ] || "$1" -m venv --without-pip "$3" || return
    if [ -n "$kind" ]; then
        # What the wheels require, and not themselves: one torch serves all sets of them.
        groups=$(python -c 'import pathlib, tomllib
projects = [tomllib.load(p.open("rb"))["project"] for p in pathlib.Path().glob("packages/*/pyproject.toml")]
extras = [e for p in projects for e in p.get("optional-dependencies", {}).get("cli", [])]
needs = {*extras, *(d for p in projects for d in p["dependencies"])}
print("\n".join(sorted(d for d in needs if not d.startswith(("tp-", "torch")))))') || return
        mapfile -t groups <<< "$groups"
        "${pip[@]}" install --quiet pip packaging "torch==$2" "${groups[@]}"
        return
    fi
    groups=$(python -c 'import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["test"]))') || return
    mapfile -t groups <<< "$groups"
    # Together: the packages must not bring another torch.
    "${pip[@]}" install --quiet pip "torch==$2" "${groups[@]}" -e packages/tp-context -e packages/tp-core -e packages/tp-data -e packages/tp-dp-gather -e packages/tp-launch -e packages/tp-pipeline \
        -e packages/tp-accelerate -e packages/tp-lightning -e packages/tp-testing -e packages/tp-ray -e packages/tp-runner -e packages/tp-shard -e packages/tp-simulator -e packages/tp-trainer -e packages/tp-tuple -e packages/tp-verify
}

if [ -n "$kind" ]; then
    rm -rf "$folder/wheels"
    python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder/wheels" packages/tp-* || exit 1
fi
for minor in $pythons; do
    mapfile -t found < <(interpreters "$minor")
    [ ${#found[@]} -gt 0 ] || missing+=("$minor")
    for interpreter in "${found[@]}"; do
        try "$interpreter" "$torch"
    done
done
for pair in $also; do
    minor=${pair%=*} other=${pair#*=}
    interpreter=$(interpreters "$minor" | head -n 1)
    if [ -n "$interpreter" ]; then try "$interpreter" "$other"; else missing+=("$minor for torch $other"); fi
done

echo
{
    echo "PYTHON|INTERPRETER|TORCH|RESULT"
    printf '%s\n' "${rows[@]}"
} | column -t -s '|'
[ ${#missing[@]} -eq 0 ] || echo "not on this machine: Python ${missing[*]}"
exit "$failures"
