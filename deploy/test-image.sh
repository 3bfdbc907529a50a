#!/usr/bin/env bash
# Build the Dockerfile without a Docker engine, and send the server in the image an image for every demo task:
#   deploy/test-image.sh [cpu|cuda]
#
# A fresh Debian with Python replaces the official Python image. The build uses this machine's pip configuration and
# the folders it names, and TORCH_INDEX, if set. The server runs as the image's user on a read-only root, in its own
# mount namespace, on the CPU for both images.
#
# Needs root, Debian's buildah and debootstrap, and about 6 GB below TMPDIR (30 GB for cuda), which are freed at the
# end.
set -euo pipefail
cd "$(dirname "$0")/.."

device=${1:-cpu}
work=$(mktemp -d)
server=
clean_up() {
    if [ -n "$server" ]; then kill -KILL "$server" 2> /dev/null || true; fi
    buildah umount --all > /dev/null 2>&1 || true
    umount "$work/storage/overlay" 2> /dev/null || true
    # Never delete through a mount: this machine's own files may be behind it.
    if grep -q " $work" /proc/self/mounts; then
        echo "something is still mounted below $work: not deleted" >&2
    else
        rm -rf "$work"
    fi
}
trap clean_up EXIT

say() { echo "== $*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
buildah() { command buildah --storage-driver overlay --root "$work/storage" --runroot "$work/run" "$@"; }
megabytes() { du --summarize --total --block-size=1M "$@" | tail -1 | cut -f1; }

say "the base: Debian with Python and its headers, instead of the official image"
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
container=$(buildah from scratch)
base=$(buildah mount "$container")
debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,ca-certificates "$release" "$base" \
    > "$work/debootstrap.log" || { tail "$work/debootstrap.log"; fail "debootstrap"; }
base_size=$(megabytes "$base")
buildah commit --quiet --rm "$container" engram-base > /dev/null

say "this machine's pip configuration"
python3 - "$work/pip.conf" "$device" > "$work/folders" << 'PYTHON'
import ast, subprocess, sys
from pathlib import Path

listing = subprocess.run(
    [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
)
lines = [line.partition("=") for line in listing.stdout.splitlines()]
options = {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in lines}
if sys.argv[2] == "cuda":
    # Local files may be CPU builds of torch, which pip prefers.
    options.pop("find-links", None)
text = "".join(f"{name} = {value}\n" for name, value in options.items())
Path(sys.argv[1]).write_text(f"[global]\n{text}")
for word in " ".join(options.values()).split():
    # The files of an index are beside it.
    path = Path(word.removeprefix("file://")).parent if word.startswith("file://") else Path(word)
    if path.is_absolute() and path.exists():
        print(path)
PYTHON
volumes=(--volume "$work/pip.conf:/etc/pip.conf:ro")
while read -r folder; do
    volumes+=(--volume "$folder:$folder:ro")
done < <(sort --unique "$work/folders")

build() {
    buildah build --isolation chroot --format docker --pull-never --build-arg BASE=localhost/engram-base \
        "${volumes[@]}" "$@"
}

say "a build for an unknown device is refused"
# Through a pipe: the processes of a build overwrite each other's lines in a file.
if build --build-arg DEVICE=tpu . 2>&1 | cat > "$work/refusal"; then fail "it was built"; fi
grep "^error: DEVICE is 'tpu'" "$work/refusal" || { tail "$work/refusal"; fail "it did not say why"; }

say "the image for $device"
build --build-arg DEVICE="$device" --build-arg TORCH_INDEX="${TORCH_INDEX:-}" --tag engram-test . 2>&1 \
    | cat > "$work/build.log" || { tail -40 "$work/build.log"; fail "the build"; }
grep -E '^\[[0-9/]+\] STEP|^Successfully installed .*(engram|torch)' "$work/build.log"

container=$(buildah from --pull-never localhost/engram-test)
root=$(buildah mount "$container")
config() { buildah inspect --type image --format "$1" localhost/engram-test; }
mapfile -t variables < <(config '{{range .OCIv1.Config.Env}}{{println .}}{{end}}' | grep .)
mapfile -t command < <(config '{{range .OCIv1.Config.Entrypoint}}{{println .}}{{end}}{{range .OCIv1.Config.Cmd}}{{println .}}{{end}}' | grep .)
mapfile -t health < <(config '{{range .Docker.Config.Healthcheck.Test}}{{println .}}{{end}}' | grep .)
user=$(config '{{.OCIv1.Config.User}}')
folder=$(config '{{.OCIv1.Config.WorkingDir}}')

# `in_image NAME=VALUE… -- COMMAND…`: like a container engine, with a read-only root and two writable places. The
# optional folder $mounted is mounted at /mnt.
in_image() {
    local settings=()
    while [ "$1" != -- ]; do settings+=("$1"); shift; done
    shift
    exec unshare --mount bash -euc '
        root=$1 user=$2 folder=$3 mounted=$4; shift 4
        mount --bind "$root" "$root"
        mount --options remount,bind,ro "$root"
        mount --rbind /dev "$root/dev"
        mount --rbind /proc "$root/proc"
        mount -t tmpfs tmpfs "$root/tmp"
        if [ -n "$mounted" ]; then mount --bind "$mounted" "$root/mnt"; fi
        mount -t tmpfs -o "uid=${user%:*},gid=${user#*:},mode=755" tmpfs "$root$folder"
        exec chroot --userspec="$user" --groups= "$root" "$@"
    ' bash "$root" "$user" "$folder" "${mounted:-}" /usr/bin/env -i --chdir="$folder" "${variables[@]}" "${settings[@]}" "$@"
}

say "torch is the build for $device"
(in_image -- python3 -c "
import torch
print('torch', torch.__version__, 'CUDA', torch.version.cuda)
assert (torch.version.cuda is not None) == ('$device' == 'cuda')") || fail "it is not"
if [ "$device" = cuda ]; then
    say "Triton compiles its driver module with the compiler and the headers in the image"
    (in_image -- python3 -c "
import shutil, tempfile
from pathlib import Path
import triton.backends.nvidia
from triton.runtime.build import _build
backend = Path(triton.backends.nvidia.__file__).parent
folder = tempfile.mkdtemp()
source = shutil.copy(backend / 'driver.c', folder)
print(_build('cuda_utils', source, folder, [], [str(backend / 'include')], [], []))") || fail "it does not"
fi

say "keys are created with the image alone"
mounted=$work/keys
mkdir --mode=777 "$mounted"
(in_image -- "${command[0]}" keys add prometheus --scope metrics --file /mnt/keys.json) > "$work/metrics-key" \
    || fail "keys add"
mounted=
grep --quiet '^engram_' "$work/metrics-key" || fail "it printed no key"
grep --quiet prometheus "$work/keys/keys.json" || fail "it wrote no keys file"

say "without a key it refuses to serve other machines"
if (in_image -- "${command[@]}") > "$work/refusal" 2>&1; then fail "it started"; fi
grep "no key is set" "$work/refusal" || { cat "$work/refusal"; fail "it did not say why"; }

say "with one it serves"
key=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port
serving=(ENGRAM_DEVICES=cpu ENGRAM_HOST=127.0.0.1 "ENGRAM_PORT=$port" "ENGRAM_API_KEY=$key")
in_image "${serving[@]}" -- "${command[@]}" > "$work/server.log" 2>&1 &
server=$!
for _ in $(seq 600); do
    kill -0 "$server" 2> /dev/null || { cat "$work/server.log"; fail "the server ended"; }
    if curl --silent --fail --output /dev/null "$url/readyz"; then break; fi
    sleep 0.5
done
(in_image "${serving[@]}" -- "${health[@]:1}") || fail "the image's health check"

runs_as=$(awk '$1 == "Uid:" { print $2 }' "/proc/$server/status")
[ "$runs_as" = 10001 ] || fail "it runs as user $runs_as"
if nsenter --target "$server" --mount touch "$root/opt/engram/written" 2> /dev/null; then fail "the root is writable"; fi
status=$(curl --silent --output /dev/null --write-out '%{http_code}' "$url/tasks")
[ "$status" = 401 ] || fail "without the key it answers $status"
page=$(curl --silent --fail --location "$url/") || fail "the console is not served"
grep --quiet '<title>' <<< "$page" || fail "the console is not a page"
echo "user $runs_as, read-only root, 401 without the key, console there"

for bundle in server/engram_server/embedded/tasks/*.safetensors base; do
    task=$(basename "$bundle" .safetensors)
    answer=$(curl --silent --show-error --fail-with-body -H "X-API-Key: $key" \
        -T server/engram_server/console/samples/rocket.jpg "$url/predict?tasks=$task&top_k=1") || fail "$task: $answer"
    grep --only-matching '"predictions": *\[{[^]]*}\]' <<< "$answer" | sed "s/^/$task: /" || fail "$task: $answer"
done

kill -TERM "$server"
wait "$server" || fail "it ended with exit code $?"
server=
echo "exit code 0 after SIGTERM"

say "size, in megabytes"
packages=$(echo "$root"/opt/engram/lib/python3*/site-packages)
image_size=$(megabytes "$root")
shopt -s nullglob
torch_size=$(megabytes "$packages"/torch "$packages"/torch-*.dist-info "$packages"/nvidia* "$packages"/cuda* "$packages"/triton*)
echo "image $image_size, without torch $((image_size - torch_size)), of which the base is $base_size"
