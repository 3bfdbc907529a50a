#!/usr/bin/env bash
# Installs the programs from Debian that some tests drive, where they are not there yet.
set -euo pipefail
declare -A package=(
    [chromium]=chromium
    [haproxy]=haproxy
    # Debian 13 or newer: the kubectl of Debian 12 cannot read today's overlays.
    [kubectl]=kubernetes-client
    [promtool]=prometheus
)
missing=()
for program in "${!package[@]}"; do
    PATH=$PATH:/usr/sbin command -v "$program" > /dev/null || missing+=("${package[$program]}")
done
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    as_root=(sudo)
fi
"${as_root[@]}" apt-get update --quiet
# Not at a run level in which the packages would start their services.
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
    apt-get install --yes --quiet --no-install-recommends "${missing[@]}"
