#!/bin/sh
# Makes the distributions that are published, in dist/, and checks them.
set -e
rm -rf dist
for package in packages/tp-*; do
    python -m build --no-isolation --outdir dist "$package"
done
twine check --strict dist/*
check-wheel-contents dist/*.whl
