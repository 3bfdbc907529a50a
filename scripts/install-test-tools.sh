#!/usr/bin/env bash
# Installs the programs that some tests need, if they are missing: Debian packages on the machine,
# and Azurite into the virtual environment $1 (default: .venv).
set -euo pipefail
venv=${1:-$(dirname "$0")/../.venv}
mkdir -p "$venv"
declare -A package=(
    [chromium]=chromium
    [haproxy]=haproxy
    # Debian 13 or newer: the kubectl of Debian 12 cannot read today's overlays.
    [kubectl]=kubernetes-client
    [npm]=npm
    [promtool]=prometheus
)
missing=()
for program in "${!package[@]}"; do
    PATH=$PATH:/usr/sbin command -v "$program" > /dev/null || missing+=("${package[$program]}")
done
if [ ${#missing[@]} -ne 0 ]; then
    as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        as_root=(sudo)
    fi
    "${as_root[@]}" apt-get update --quiet
    # Not at a run level in which the packages would start their services.
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
        apt-get install --yes --quiet --no-install-recommends "${missing[@]}"
fi
# axe-core, which checks the console's accessibility.
npm ci --silent --no-audit --no-fund --prefix "$(dirname "$0")/.."
# Later ones need a newer Node.js than Debian has.
azurite=azurite@3.35.0
npm ls --global --prefix "$venv" "$azurite" > /dev/null ||
    npm install --global --prefix "$venv" --prefer-offline --no-audit --no-fund \
        --ignore-scripts --omit=optional "$azurite"
