#!/bin/sh
# What a build with the feature `cuda` needs in the environment, as lines for a shell: eval "$(scripts/cuda.sh)"
#
#   scripts/cuda.sh [--compiler]     --compiler: enough for kernels/ alone (scripts/kernels.sh)
#
# CUDA 13 of CUDA_HOME, of the PATH or of /usr/local/cuda, whichever comes first; where there is none, CUDA 13.0 is installed
# from Python packages into TAPER_CUDA (default ~/.cache/taper/cuda-13.0; 0.3 GB for the compiler, 1.2 GB for all). Needs no GPU
# and no root, but Python 3 with venv. The machine that runs the build needs a driver of 580 or later.
set -eu

# `false` is what a shell gets to see that evaluates the lines.
fail() {
    echo "cuda.sh: $1" >&2
    echo false
    exit 1
}

# The folder of a toolkit's libraries.
libraries() {
    if [ -d "$1/lib64" ]; then echo "$1/lib64"; else echo "$1/targets/x86_64-linux/lib"; fi
}

# Whether a folder has nvcc 13, and where all is wanted the libraries that a build links.
has() {
    [ -x "$1/bin/nvcc" ] && "$1/bin/nvcc" --version | grep -q 'release 13\.' || return
    [ "$want" = compiler ] || { [ -e "$(libraries "$1")/libcublas.so" ] && [ -e "$(libraries "$1")/libcurand.so" ]; }
}

# Every part pinned: a newer nvvm or crt than nvcc makes PTX that ptxas rejects. Whatever is said goes to the terminal.
install() {
    echo "cuda.sh: installing CUDA 13.0 ($want) under $folder"
    [ -x "$folder/bin/pip" ] || python3 -m venv "$folder" || return
    "$folder/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir \
        "cuda-toolkit[$1]==13.0.2" 'nvidia-nvvm==13.0.88' 'nvidia-cuda-crt==13.0.88' || return
    home=$(echo "$folder"/lib/python3.*/site-packages/nvidia/cu13)
    # Where nvcc looks for the runtime, and the linker for libraries by their plain names.
    ln -sfn lib "$home/lib64" || return
    for library in "$home"/lib/lib*.so.*; do
        library=${library##*/}
        ln -sf "$library" "$home/lib/${library%%.so*}.so" || return
    done
    [ "$want" = compiler ] || driver "$home"
}

# A driver library to link against where there is no driver: every function by name, none of which does anything.
driver() {
    mkdir -p "$1/lib/stubs"
    grep -oE '\bcu[A-Z]\w+' "$1/include/cuda.h" | sort -u | while read -r name; do
        for ending in '' _v2 _v3 _v4 _ptsz _ptds; do
            echo "int $name$ending(void) { return 1; }"
        done
    done | sort -u | "${CC:-cc}" -w -shared -fPIC -Wl,-soname,libcuda.so.1 -x c - -o "$1/lib/stubs/libcuda.so"
}

want=all
[ "${1:-}" != --compiler ] || want=compiler
folder=${TAPER_CUDA:-${XDG_CACHE_HOME:-$HOME/.cache}/taper/cuda-13.0}
home=
nvcc=$(command -v nvcc || true)
for candidate in "${CUDA_HOME:-}" "${nvcc:+$(dirname "$(dirname "$(realpath "$nvcc")")")}" /usr/local/cuda /usr/local/cuda-13.0; do
    if [ -n "$candidate" ] && has "$candidate"; then
        home=$candidate
        break
    fi
done
if [ -z "$home" ]; then
    if [ ! -e "$folder/has-$want" ]; then
        parts=nvcc,cudart,crt,cccl
        [ "$want" = compiler ] || parts=$parts,cublas,curand,nvrtc
        install "$parts" >&2 ||
            fail "there is no CUDA 13 in CUDA_HOME, on the PATH or in /usr/local/cuda, and it could not be installed under $folder"
        touch "$folder/has-compiler" "$folder/has-$want"
    fi
    home=$(echo "$folder"/lib/python3.*/site-packages/nvidia/cu13)
fi
if ! "$home/bin/nvcc" --version | grep -q 'release 13\.0'; then
    echo "cuda.sh: $home is newer than CUDA 13.0: a driver of its release is needed, 580 is too old for it" >&2
fi
printf "export CUDA_HOME='%s' CUDA_COMPUTE_CAP='%s' PATH='%s':\"\$PATH\"\n" "$home" "${CUDA_COMPUTE_CAP:-90}" "$home/bin"
[ "$want" = compiler ] || printf "export LD_LIBRARY_PATH='%s'\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}\n" "$(libraries "$home")"
