#!/usr/bin/env bash
# An environment for images whose own torch has CUDA, as those of GH200 machines do: scripts/gh200_setup_local_tinker.sh [FOLDER]
# It sees the image's packages and keeps that torch; with a plain environment pip may install one that has no CUDA.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
folder=${1:-.venv-gh200}

torch=$("$python" -c '
import sys
if sys.version_info < (3, 11):
    sys.exit("error: %s is Python %d.%d; 3.11 or later is needed: name another by PYTHON=" % (sys.executable, *sys.version_info[:2]))
try:
    import torch
except ImportError:
    sys.exit(f"error: {sys.executable} has no torch; use an image whose Python has one with CUDA, or follow README.md")
if torch.version.cuda is None:
    sys.exit(f"error: torch {torch.__version__} of {sys.executable} has no CUDA; use an image whose torch has, or follow README.md")
print(torch.__version__)
')
"$python" -m venv --system-site-packages "$folder"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
echo "torch==$torch" > "$constraints"
"$folder/bin/python" -m pip install --constraint "$constraints" -e "$root"
"$folder/bin/python" -c 'import torch; print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, device found: {torch.cuda.is_available()}")'
echo "source $folder/bin/activate"
