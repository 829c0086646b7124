#!/usr/bin/env bash
# Builds sdist and wheel into dist/, installs the wheel into an empty environment (torch and what the wheel asks for), and runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
wheel=dist/mismatch_ext-$version-py3-none-any.whl
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT

rm -rf dist
.venv/bin/python -m build --no-isolation --outdir dist . > "$empty/build.log" 2>&1 || { cat "$empty/build.log"; exit 1; }
"${PYTHON:-python3}" -m venv "$empty/venv"
# The constraint on torch keeps the index from choosing another build of it; what torch itself needs is the index's.
grep '^torch==' requirements/constraints-cpu.txt > "$empty/torch.txt"
"$empty/venv/bin/pip" install --quiet -c "$empty/torch.txt" torch
SECONDS=0
"$empty/venv/bin/pip" install --quiet -c "$empty/torch.txt" "$wheel"
installed=$SECONDS

cd "$empty" # where no source lies
run=venv/bin/mismatch-ext
[ "$($run --version)" = "mismatch-ext $version" ]
$run --help > help.txt
for command in demo report doctor readiness trl compat; do
    grep -qE "^ *$command( |\$)" help.txt || { echo "--help does not name $command"; exit 1; }
done
venv/bin/python -c 'import importlib.resources as files; assert files.files("mismatch_ext").joinpath("py.typed").is_file()'
# The first run also compiles the bytecode of torch's modules.
demo=
for again in 1 2 3; do
    SECONDS=0
    $run demo --out shown > demo.txt
    demo="$demo $SECONDS"
done
cat demo.txt
grep -q repetition_penalty demo.txt && test -s shown/report.html
cd - > /dev/null
echo "[dist] $wheel: $(du -h --apparent-size "$wheel" | cut -f1), $(unzip -Z1 "$wheel" | wc -l) files, installed in ${installed} s beside torch, demo three times:${demo} s"
