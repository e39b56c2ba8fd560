#!/usr/bin/env bash
# Where there is no Docker: run the steps of deploy/Dockerfile for --target cpu in a bare Debian, then
# the server in it as a pod would, and ask it something.
#
#   deploy/bare-root.sh DIRECTORY
#
# DIRECTORY becomes the root file system (3 GB); one that is there already is gone on with. Needs
# root, debootstrap, a C++ compiler, curl, and the ways to Debian and PyPI. Debian's Python stands in
# for that of the images this one is made from. In the environment:
#
#   PYTHON       the python that builds the wheel, of the same version as Debian's 3.11: python3
#   WHEELS       a directory of wheels that pip may take, too
#   TORCH_INDEX  as of the Dockerfile
#   PIP_...      as pip has them
set -euo pipefail

root=$(realpath -m "${1:?usage: deploy/bare-root.sh DIRECTORY}")
cd "$(dirname "$0")/.."
say() { echo "bare-root: $*" >&2; }

# What a stage of the Dockerfile runs, a line for each RUN.
runs() {
  sed -n "/^FROM .* AS $1\$/,/^FROM .* AS /p" deploy/Dockerfile | sed 's/#.*//' |
    sed ':a;/\\$/{N;s/\\\n//;ba}' | sed -n 's/^RUN //p'
}

# In the root file system, with what the image says of the environment.
within() {
  local name given=()
  for name in "${!PIP_@}" http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    case $name in PIP_CERT | PIP_EXTRA_INDEX_URL | PIP_FIND_LINKS) continue ;; esac
    [ -z "${!name-}" ] || given+=("$name=${!name}")
  done
  chroot "$root" env -i "${given[@]}" PATH=/opt/weft/bin:/usr/local/bin:/usr/bin:/bin HOME=/root \
    PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="${TORCH_INDEX-https://download.pytorch.org/whl/cpu}" \
    ${PIP_CERT:+PIP_CERT=/etc/ssl/certs/ca-certificates.crt} ${WHEELS:+PIP_FIND_LINKS=/wheels} "$@"
}

if [ ! -e "$root/usr/bin/python3" ]; then
  say "Debian into $root"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >&2
fi
ln -sf python3 "$root/usr/bin/python"
mkdir -p "$root/src" "$root/dist" "$root/wheels"
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
[ -z "${PIP_CERT:-}" ] || cp "$PIP_CERT" "$root/etc/ssl/certs/ca-certificates.crt"
[ -z "${WHEELS:-}" ] || cp "$WHEELS"/*.whl "$root/wheels"
cp constraints.txt "$root/src"
rm -rf "$root/opt/weft"  # pip would keep a weft of the same version

say "the wheel"
rm -f "$root"/dist/*
"${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$root/dist" .
while read -r step; do
  say "$step"
  within sh -ec "cd /src; $step" < /dev/null
done < <(runs cpu-environment; [ -d "$root/cache" ] || runs base)

say "weft serve, as user 4242 of group 0, with a root file system that is read-only"
health=$(grep -A1 '^HEALTHCHECK' deploy/Dockerfile | tail -1)
export root health
unshare --mount --pid --fork --kill-child --propagation private bash -euo pipefail <<'INSIDE'
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$root/cache"
mount --rbind /dev "$root/dev"
pod=(chroot --userspec=4242:0 --groups=0 "$root" env -i -C /cache PATH=/opt/weft/bin:/usr/bin:/bin
  HOME=/cache USER=weft PYTHONUNBUFFERED=1)
for file in /opt/weft/x /src/x; do
  touch "$root$file" 2> /dev/null && { echo "bare-root: $file can be written" >&2; exit 1; }
done
"${pod[@]}" weft serve weft-demo --host=127.0.0.1 --port=8765 --threads=1 --device=cpu &
server=$!
mapfile -t check < <("${pod[@]}" python -c \
  'import json, sys; print(*json.loads(sys.argv[1]), sep="\n")' "${health//8000/8765}")
until "${pod[@]}" "${check[@]}" 2> /dev/null; do
  kill -0 $server
  sleep 1
done
echo "bare-root: the health check is content" >&2
curl --silent --show-error --fail http://127.0.0.1:8765/v1/completions \
  --header 'content-type: application/json' \
  --data '{"model": "weft-demo", "prompt": "2 + 2 =", "max_tokens": 4, "temperature": 0}'
echo
kill -TERM $server
wait $server
INSIDE
say "it answered, and ended with 0"
